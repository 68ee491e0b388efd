// RMS norm over rows of a strided matrix. No torch header: callers pass raw addresses.
#pragma once

#include <cstdint>

namespace mindspeed {

enum class Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Row r starts at element (r / inner) * outer_stride + (r % inner) * inner_stride; its elements are adjacent.
struct Rows {
  int64_t outer, inner, outer_stride, inner_stride, width;

  int64_t count() const { return outer * inner; }
  int64_t offset(int64_t r) const {
    return outer == 1 ? r * inner_stride : (r / inner) * outer_stride + (r % inner) * inner_stride;
  }
};

// x: laid out as `rows`, y: [rows, width] contiguous, rstd: [rows] fp32, w: [width].
void rms_norm_forward(Dtype dtype, const Rows& rows, const void* x, const void* w, void* y, float* rstd, float eps,
                      int threads, int level);

// dy, dx: [rows, width] contiguous, dw: [width] of the same type. The bits of dw depend on the shape alone: rows are
// summed in blocks of a fixed size, and the blocks in order, whatever the number of threads.
void rms_norm_backward(Dtype dtype, const Rows& rows, const void* dy, const void* x, const void* w, const float* rstd,
                       void* dx, void* dw, int threads, int level);

}  // namespace mindspeed
