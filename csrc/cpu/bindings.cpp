// The Python module mindspeed_llm.ops._cpu_kernels. Tensors arrive as addresses, so that one build serves every torch;
// the callers in mindspeed_llm/ops/*/cpu.py check shapes, types and strides before they pass one.
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "../common/levels.h"
#include "rms_norm.h"

namespace py = pybind11;

namespace {

// Raised with any change of a signature below: Python refuses a module built from other sources.
constexpr int kInterface = 1;

mindspeed::Dtype checked_dtype(int code) {
  if (code < 0 || code > 2) throw std::invalid_argument("dtype code: 0 float32, 1 bfloat16 or 2 float16");
  return static_cast<mindspeed::Dtype>(code);
}

int checked_level(int level) {
  if (level < mindspeed::kPortable || level > mindspeed::best_level())
    throw std::invalid_argument("instruction set level not supported by this processor");
  return level;
}

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

mindspeed::Rows unpack(const py::tuple& t) {
  if (t.size() != 5) throw std::invalid_argument("rows: (outer, inner, outer_stride, inner_stride, width)");
  return {t[0].cast<int64_t>(), t[1].cast<int64_t>(), t[2].cast<int64_t>(), t[3].cast<int64_t>(), t[4].cast<int64_t>()};
}

void rms_norm_forward(int dtype, const py::tuple& rows, uintptr_t x, uintptr_t w, uintptr_t y, uintptr_t rstd,
                      double eps, int threads, int level) {
  const auto type = checked_dtype(dtype);
  const auto layout = unpack(rows);
  checked_level(level);
  py::gil_scoped_release unlocked;
  mindspeed::rms_norm_forward(type, layout, at<void>(x), at<void>(w), at<void>(y), at<float>(rstd),
                              static_cast<float>(eps), threads, level);
}

void rms_norm_backward(int dtype, const py::tuple& rows, uintptr_t dy, uintptr_t x, uintptr_t w, uintptr_t rstd,
                       uintptr_t dx, uintptr_t dw, int threads, int level) {
  const auto type = checked_dtype(dtype);
  const auto layout = unpack(rows);
  checked_level(level);
  py::gil_scoped_release unlocked;
  mindspeed::rms_norm_backward(type, layout, at<void>(dy), at<void>(x), at<void>(w), at<float>(rstd), at<void>(dx),
                               at<void>(dw), threads, level);
}

}  // namespace

PYBIND11_MODULE(_cpu_kernels, m) {
  m.doc() = "C++ CPU kernels of mindspeed_llm.ops; arguments are addresses and strides in elements.";
  m.attr("INTERFACE") = kInterface;
  m.attr("BEST_LEVEL") = mindspeed::best_level();
  m.def("rms_norm_forward", &rms_norm_forward, py::arg("dtype"), py::arg("rows"), py::arg("x"), py::arg("w"),
        py::arg("y"), py::arg("rstd"), py::arg("eps"), py::arg("threads"), py::arg("level"));
  m.def("rms_norm_backward", &rms_norm_backward, py::arg("dtype"), py::arg("rows"), py::arg("dy"), py::arg("x"),
        py::arg("w"), py::arg("rstd"), py::arg("dx"), py::arg("dw"), py::arg("threads"), py::arg("level"));
}
