// The table of functions that each CPU level provides.
//
// kernels.cpp is compiled once for each level, in a namespace of its own; dispatch.cpp picks a table at run
// time and the dispatch_*.cpp split the tasks among threads. Sizes and strides count elements and are int64_t
// throughout: tensors may hold more than 2^31 of them.

#pragma once

#include "casts.h"
#include "mx.h"
#include "mxfp4.h"
#include "scaled.h"

namespace lowp {

enum Input : int { kBF16 = 0, kF16 = 1, kF32 = 2 };  // also the output types of dequantization (kBF16, kF32)

struct Kernels {
    MxKernels mx;
    CastKernels casts;
    Mxfp4Kernels mxfp4;
    ScaledKernels scaled;
};

extern const Kernels kernels_base;
extern const Kernels kernels_v3;
extern const Kernels kernels_v4;

}  // namespace lowp
