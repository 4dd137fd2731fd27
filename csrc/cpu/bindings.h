// Array types and helpers that the binding files share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "gil.h"
#include "runtime.h"

namespace caudal {

namespace nb = nanobind;

template <class T, int N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using MutableArray = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T>
using NumpyArray = nb::ndarray<nb::numpy, T>;

using F32Vector = Array<float, 1>;
using F32Matrix = Array<float, 2>;
using I32Vector = Array<int32_t, 1>;
using I32Matrix = Array<int32_t, 2>;

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// A new array that owns its memory, uninitialised.
template <class T>
NumpyArray<T> new_array(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (size_t n : shape) size *= n;
  T* data = new T[size > 0 ? size : 1];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return NumpyArray<T>(data, shape, owner);
}

template <class A>
auto* data_or_null(const std::optional<A>& array) {
  return array ? array->data() : nullptr;
}

// The array that attribute `name` of a dataclass holds. Throws TypeError for another type or layout.
template <class A>
A field(nb::handle object, const char* name) {
  A array;
  if (!nb::try_cast<A>(nb::getattr(object, name), array, false)) {
    throw nb::type_error((std::string(name) + ": wrong dtype, dimensions or layout").c_str());
  }
  return array;
}

// A Batch that points into the arrays of a BatchArrays, which must outlive it. Checks that sizes
// agree, not what the arrays say.
Batch batch_from(nb::handle arrays);

// Chosen tokens of each row: the fields of SamplingResult in order.
using SampleResult = std::tuple<NumpyArray<int32_t>, NumpyArray<float>, NumpyArray<int32_t>,
                                NumpyArray<int32_t>, NumpyArray<float>>;
SampleResult sample(const Runtime& runtime, MutableArray<float, 2> logits, nb::handle params);
NumpyArray<int32_t> best_allowed(const Runtime& runtime, Array<float, 2> logits,
                                 I32Vector logit_rows, Array<int32_t, 2> mask_words);

void bind_guesses(nb::module_& m);
void bind_runtime(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_testing(nb::module_& m);
void bind_bench(nb::module_& m);

}  // namespace caudal
