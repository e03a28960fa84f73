// fused.cu on the emulated device.
#define EMULATED
#ifndef HALF
#define HALF 0
#endif
#ifndef FP8
#define FP8 0
#endif
#include "device.h"
#include "fused.cu"

extern "C" int params_bytes() { return sizeof(Params); }
extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" void launch(const Params* p, int blocks, void (*previous)()) {
  device::run_grid(blocks, THREADS, SHARED_BYTES, previous, [&] { NAME(*p); });
}
