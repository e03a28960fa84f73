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
// What went wrong, or null.
extern "C" const char* launch(const Params* p, int blocks, void (*previous)()) {
  return device::run_blocks(0, blocks, blocks, THREADS, SHARED_BYTES, false, previous, [&] { NAME(*p); }) ? nullptr : device::message.c_str();
}
