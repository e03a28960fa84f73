// Allocation and sharing of the buffers. Driver functions are looked up at run time, so that the library loads on a
// machine without a driver. Every function returns 0 or a CUDA error code: of the runtime, or, for the vmm_
// functions, 100000 + the driver's.
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <unistd.h>

#include <cstring>

#include "call.h"

namespace {

constexpr int kDriverError = 100000;

#define RETURN_IF_ERROR(expression)                       \
  do {                                                    \
    const cudaError_t error_ = (expression);              \
    if (error_ != cudaSuccess) return (void)cudaGetLastError(), static_cast<int>(error_); \
  } while (0)

#define RETURN_IF_DRIVER_ERROR(expression)                             \
  do {                                                                 \
    const CUresult error_ = (expression);                              \
    if (error_ != CUDA_SUCCESS) return kDriverError + static_cast<int>(error_); \
  } while (0)

template <typename F>
F driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found) != cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<F>(function) : nullptr;
}

#define DRIVER(name)                                                        \
  const auto p_##name = driver<decltype(&name)>(#name);                     \
  if (p_##name == nullptr) return kDriverError + static_cast<int>(CUDA_ERROR_NOT_FOUND)

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp p = {};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}

int granularity(int device, size_t* out) {
  DRIVER(cuMemGetAllocationGranularity);
  const CUmemAllocationProp p = properties(device);
  RETURN_IF_DRIVER_ERROR(p_cuMemGetAllocationGranularity(out, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  return 0;
}

// Maps an allocation for this device; on an error nothing stays reserved.
int map(int device, CUmemGenericAllocationHandle handle, size_t size, CUdeviceptr* out) {
  DRIVER(cuMemAddressReserve);
  DRIVER(cuMemAddressFree);
  DRIVER(cuMemMap);
  DRIVER(cuMemUnmap);
  DRIVER(cuMemSetAccess);
  CUdeviceptr at = 0;
  RETURN_IF_DRIVER_ERROR(p_cuMemAddressReserve(&at, size, 0, 0, 0));
  CUresult error = p_cuMemMap(at, size, 0, handle, 0);
  if (error == CUDA_SUCCESS) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    error = p_cuMemSetAccess(at, size, &access, 1);
    if (error != CUDA_SUCCESS) (void)p_cuMemUnmap(at, size);
  }
  if (error != CUDA_SUCCESS) {
    (void)p_cuMemAddressFree(at, size);
    return kDriverError + static_cast<int>(error);
  }
  *out = at;
  return 0;
}

int zero(void* at, size_t size) {
  RETURN_IF_ERROR(cudaMemset(at, 0, size));
  RETURN_IF_ERROR(cudaDeviceSynchronize());
  return 0;
}

}  // namespace

extern "C" {

int one_shot_alloc(int device, uint64_t size, uint64_t* out) {
  void* at = nullptr;
  RETURN_IF_ERROR(cudaSetDevice(device));
  RETURN_IF_ERROR(cudaMalloc(&at, size));
  const int error = zero(at, size);
  if (error != 0) (void)cudaFree(at);
  *out = reinterpret_cast<uint64_t>(at);
  return error;
}

int one_shot_free(int device, uint64_t at) {
  RETURN_IF_ERROR(cudaSetDevice(device));
  RETURN_IF_ERROR(cudaFree(reinterpret_cast<void*>(at)));
  return 0;
}

// Host memory that device and host both see: the control words.
int one_shot_alloc_control(int device, uint64_t size, uint64_t* host, uint64_t* mapped) {
  void *at = nullptr, *on_device = nullptr;
  RETURN_IF_ERROR(cudaSetDevice(device));
  RETURN_IF_ERROR(cudaHostAlloc(&at, size, cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(at, 0, size);
  const cudaError_t error = cudaHostGetDevicePointer(&on_device, at, 0);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    (void)cudaFreeHost(at);
    return error;
  }
  *host = reinterpret_cast<uint64_t>(at);
  *mapped = reinterpret_cast<uint64_t>(on_device);
  return 0;
}

int one_shot_free_control(uint64_t host) {
  RETURN_IF_ERROR(cudaFreeHost(reinterpret_cast<void*>(host)));
  return 0;
}

int one_shot_ipc_export(int device, uint64_t at, unsigned char* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == 64, "the exchange carries 64 bytes");
  RETURN_IF_ERROR(cudaSetDevice(device));
  cudaIpcMemHandle_t h;
  RETURN_IF_ERROR(cudaIpcGetMemHandle(&h, reinterpret_cast<void*>(at)));
  std::memcpy(handle, &h, sizeof(h));
  return 0;
}

int one_shot_ipc_open(int device, const unsigned char* handle, uint64_t* out) {
  void* at = nullptr;
  cudaIpcMemHandle_t h;
  std::memcpy(&h, handle, sizeof(h));
  RETURN_IF_ERROR(cudaSetDevice(device));
  RETURN_IF_ERROR(cudaIpcOpenMemHandle(&at, h, cudaIpcMemLazyEnablePeerAccess));
  *out = reinterpret_cast<uint64_t>(at);
  return 0;
}

int one_shot_ipc_close(int device, uint64_t at) {
  RETURN_IF_ERROR(cudaSetDevice(device));
  RETURN_IF_ERROR(cudaIpcCloseMemHandle(reinterpret_cast<void*>(at)));
  return 0;
}

// Own buffer: created, exported as a descriptor, mapped, zeroed. `size` is rounded up in place.
int one_shot_vmm_create(int device, uint64_t* size, uint64_t* out, int32_t* fd) {
  RETURN_IF_ERROR(cudaSetDevice(device));
  RETURN_IF_ERROR(cudaFree(nullptr));  // makes the context
  DRIVER(cuMemCreate);
  DRIVER(cuMemRelease);
  DRIVER(cuMemExportToShareableHandle);
  size_t grain = 0;
  if (const int error = granularity(device, &grain)) return error;
  *size = (*size + grain - 1) / grain * grain;
  const CUmemAllocationProp p = properties(device);
  CUmemGenericAllocationHandle handle = 0;
  RETURN_IF_DRIVER_ERROR(p_cuMemCreate(&handle, *size, &p, 0));
  int descriptor = -1;
  const CUresult exported =
      p_cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  CUdeviceptr at = 0;
  int error = exported == CUDA_SUCCESS ? map(device, handle, *size, &at) : kDriverError + static_cast<int>(exported);
  (void)p_cuMemRelease(handle);  // the mapping and the descriptor keep the memory
  if (error == 0) error = zero(reinterpret_cast<void*>(at), *size);
  if (error != 0) {
    if (descriptor >= 0) (void)close(descriptor);
    return error;
  }
  *out = at;
  *fd = descriptor;
  return 0;
}

int one_shot_vmm_open(int device, int32_t fd, uint64_t size, uint64_t* out) {
  RETURN_IF_ERROR(cudaSetDevice(device));
  RETURN_IF_ERROR(cudaFree(nullptr));
  DRIVER(cuMemImportFromShareableHandle);
  DRIVER(cuMemRelease);
  CUmemGenericAllocationHandle handle = 0;
  RETURN_IF_DRIVER_ERROR(p_cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  CUdeviceptr at = 0;
  const int error = map(device, handle, size, &at);
  (void)p_cuMemRelease(handle);
  *out = at;
  return error;
}

int one_shot_vmm_close(int device, uint64_t at, uint64_t size) {
  RETURN_IF_ERROR(cudaSetDevice(device));
  DRIVER(cuMemUnmap);
  DRIVER(cuMemAddressFree);
  RETURN_IF_DRIVER_ERROR(p_cuMemUnmap(at, size));
  RETURN_IF_DRIVER_ERROR(p_cuMemAddressFree(at, size));
  return 0;
}

// For tests and the preflight: device memory as the owner sees it.
int one_shot_read(int device, uint64_t at, void* host, uint64_t size) {
  RETURN_IF_ERROR(cudaSetDevice(device));
  RETURN_IF_ERROR(cudaMemcpy(host, reinterpret_cast<const void*>(at), size, cudaMemcpyDeviceToHost));
  return 0;
}

}  // extern "C"
