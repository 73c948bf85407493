// The table of kernels of one CPU level. Compiled several times, with LOWP_LEVEL = base, v3, v4.
//
// The kernels are plain loops that compilers vectorize. All are static, and nothing from the C++ library is
// instantiated: a weak symbol compiled for AVX-512 must not be picked by the linker for the base level.

#include "kernels.h"
#include "cast_kernels.h"
#include "mx_dequant.h"
#include "mx_quant.h"
#include "mxfp4_quant.h"
#include "scaled_quant.h"

#define LOWP_JOIN_(a, b) a##b
#define LOWP_JOIN(a, b) LOWP_JOIN_(a, b)

const lowp::Kernels lowp::LOWP_JOIN(kernels_, LOWP_LEVEL) = {
    {quant_last, quant_rows, quant_dual, quant_tiles, dequant},
    {cast_encode, cast_look_up},
    {mxfp4_quant_dequant},
    {scaled_amax, scaled_amax_of_products, scaled_raise_columns, scaled_encode, scaled_encode_each,
     scaled_tabulate, scaled_look_up},
};
