// Eight elements in one 16-byte unit, summed in float32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace one_shot {

template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t pack(float a, float b) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ float2 unpack(uint32_t v) {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  }
  static __device__ __forceinline__ uint32_t pack(float a, float b) {
    const __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};

struct Sum {
  float v[8];
};

template <typename T>
__device__ __forceinline__ Sum unpack(uint4 u) {
  const float2 a = Pair<T>::unpack(u.x), b = Pair<T>::unpack(u.y);
  const float2 c = Pair<T>::unpack(u.z), d = Pair<T>::unpack(u.w);
  return Sum{{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}

template <typename T>
__device__ __forceinline__ uint4 pack(const Sum& s) {
  return make_uint4(Pair<T>::pack(s.v[0], s.v[1]), Pair<T>::pack(s.v[2], s.v[3]), Pair<T>::pack(s.v[4], s.v[5]),
                    Pair<T>::pack(s.v[6], s.v[7]));
}

__device__ __forceinline__ void add(Sum& s, const Sum& other) {
#pragma unroll
  for (int k = 0; k < 8; ++k) s.v[k] += other.v[k];
}

__device__ __forceinline__ Sum all(float value) {
  return Sum{{value, value, value, value, value, value, value, value}};
}

// The same value in every lane, whatever the lane: at each level both lanes add the same two numbers.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) v += __shfl_xor_sync(0xffffffffu, v, mask);
  return v;
}

}  // namespace one_shot
