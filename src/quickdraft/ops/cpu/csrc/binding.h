// What the binding files share: array types, and the Python object of a recorded op.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <optional>

#include "batch.h"
#include "op.h"
#include "weight.h"

namespace quickdraft {

namespace nb = nanobind;

// Arrays are taken as they are (never converted): a copy would not be the caller's buffer.
template <class Element, class... Shape>
using Array = nb::ndarray<Element, nb::c_contig, nb::device::cpu, Shape...>;
using Rows = Array<float, nb::ndim<2>>;
using ConstRows = Array<const float, nb::ndim<2>>;
using Vector = Array<const float>;

inline std::string shape_text(std::size_t rows, std::size_t width) {
    return "[" + std::to_string(rows) + ", " + std::to_string(width) + "]";
}

template <class Buffer>
void require_width(const char* op, const char* name, const Buffer& buffer, std::size_t width) {
    require(buffer.shape(1) == width, std::string(op) + ": " + name + " is " +
                                          shape_text(buffer.shape(0), buffer.shape(1)) + "; expected width " +
                                          std::to_string(width));
}

inline void require_size(const char* op, const char* name, std::size_t size, std::size_t expected) {
    require(size == expected, std::string(op) + ": " + name + " has " + std::to_string(size) +
                                  " elements; expected " + std::to_string(expected));
}

void bind_attention(nb::module_& m);
void bind_bandwidth(nb::module_& m);
void bind_drafter(nb::module_& m);
void bind_gates(nb::module_& m);
void bind_head(nb::module_& m);
void bind_kv_write(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_peaks(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_sampling(nb::module_& m);

}  // namespace quickdraft
