#include <cstdint>
#include <iterator>

#include "bindings.h"

namespace caudal {
namespace {

using RawPart = std::tuple<int, int64_t, int64_t, Array<uint8_t, 1>>;
using PackedPart = std::tuple<std::string, int64_t, Array<uint8_t, 1>>;  // format, rows, blocks

constexpr const char* kFormatNames[] = {"w4", "w8", "f16", "f32"};  // in the order of WeightFormat

WeightFormat format_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kFormatNames); ++i) {
    if (name == kFormatNames[i]) return static_cast<WeightFormat>(i);
  }
  throw std::invalid_argument("unknown weight format " + name);
}

// In the order of Activations.
constexpr const char* kActivationNames[] = {"int8", "int12", "bf16"};

Activations activations_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    if (name == kActivationNames[i]) return static_cast<Activations>(i);
  }
  throw std::invalid_argument("activations must be int8, int12 or bf16");
}

void finish(LinearWeight& weight, const Runtime& runtime, const std::optional<F32Vector>& bias,
            bool is_sensitive, const std::optional<std::string>& activations) {
  if (bias) {
    require(static_cast<int64_t>(bias->size()) == weight.rows, "bias: one value per row is needed");
    weight.bias.assign(bias->data(), bias->data() + bias->size());
  }
  weight.activations = activations    ? activations_of(*activations)
                       : is_sensitive ? runtime.table->sensitive_activations
                                      : runtime.table->activations;
}

LinearWeight pack(Runtime& runtime, const std::vector<RawPart>& parts,
                  const std::optional<F32Vector>& bias, bool is_sensitive,
                  const std::optional<std::string>& activations) {
  std::vector<RawMatrix> matrices;
  for (const auto& [type, rows, cols, data] : parts) {
    matrices.push_back({type, rows, cols, data.data(), data.size()});
  }
  LinearWeight weight;
  {
    const ReleaseGil release;
    weight = pack_linear(matrices, runtime.arena, runtime.num_threads);
  }
  finish(weight, runtime, bias, is_sensitive, activations);
  return weight;
}

// A weight over blocks that were packed before; they are used where they lie.
LinearWeight adopt(const Runtime& runtime, const std::vector<PackedPart>& parts, int64_t cols,
                   const std::optional<F32Vector>& bias, bool is_sensitive,
                   const std::optional<std::string>& activations) {
  require(!parts.empty(), "a linear weight needs at least one segment");
  require(cols > 0 && cols <= (int64_t{1} << 24) && cols % 32 == 0, "cols: not a multiple of 32");
  LinearWeight weight;
  weight.cols = cols;
  for (const auto& [format_name, rows, blocks] : parts) {
    const WeightFormat format = format_of(format_name);
    require(rows >= 1 && rows <= (int64_t{1} << 31), "rows: out of range");
    require(static_cast<int64_t>(blocks.size()) == packed_bytes(format, rows, cols),
            "blocks: their size does not fit the rows and columns");
    require(reinterpret_cast<uintptr_t>(blocks.data()) % 64 == 0, "blocks: not aligned to 64 bytes");
    // Kernels only read; the pointer keeps the array, and with it the mapping, alive.
    auto* data = reinterpret_cast<std::byte*>(const_cast<uint8_t*>(blocks.data()));
    weight.memory.emplace_back(data, [blocks](std::byte*) {});
    weight.segments.push_back({format, rows, cols, data, packed_exponent(format, rows, cols, data)});
    weight.rows += rows;
  }
  finish(weight, runtime, bias, is_sensitive, activations);
  return weight;
}

// The packed blocks of each segment, as adopt takes them.
std::vector<std::tuple<std::string, int64_t, NumpyArray<const uint8_t>>> segments(
    nb::handle_t<LinearWeight> self) {
  const auto& weight = nb::cast<const LinearWeight&>(self);
  std::vector<std::tuple<std::string, int64_t, NumpyArray<const uint8_t>>> found;
  for (const PackedMatrix& segment : weight.segments) {
    const size_t shape[] = {
        static_cast<size_t>(packed_bytes(segment.format, segment.rows, segment.cols))};
    found.emplace_back(kFormatNames[static_cast<int>(segment.format)], segment.rows,
                       NumpyArray<const uint8_t>(segment.data, 1, shape, self));
  }
  return found;
}

NumpyArray<float> unpack(const LinearWeight& weight) {
  auto out = new_array<float>({static_cast<size_t>(weight.rows), static_cast<size_t>(weight.cols)});
  unpack_linear(weight, out.data());
  return out;
}

std::vector<std::string> segment_formats(const LinearWeight& weight) {
  std::vector<std::string> names;
  for (const PackedMatrix& segment : weight.segments) {
    names.emplace_back(kFormatNames[static_cast<int>(segment.format)]);
  }
  return names;
}

std::vector<std::string> names_of(const std::vector<const KernelTable*>& tables) {
  std::vector<std::string> names;
  for (const KernelTable* table : tables) names.emplace_back(table->name);
  return names;
}

}  // namespace

void bind_runtime(nb::module_& m) {
  m.def("isa_names", [] { return names_of(all_tables()); });
  m.def("available_isas", [] { return names_of(available_tables()); });

  nb::class_<LinearWeight>(m, "LinearWeight")
      .def_ro("rows", &LinearWeight::rows)
      .def_ro("cols", &LinearWeight::cols)
      .def_prop_ro("nbytes", &LinearWeight::num_bytes)
      .def_prop_ro("formats", segment_formats)
      .def_prop_ro("activations",
                   [](const LinearWeight& w) {
                     return kActivationNames[static_cast<int>(w.activations)];
                   })
      .def_prop_ro("has_bias", [](const LinearWeight& w) { return !w.bias.empty(); })
      .def("segments", segments)
      .def("unpack", unpack);

  nb::class_<Runtime>(m, "Runtime")
      .def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("num_threads"))
      .def_prop_ro("isa", [](const Runtime& r) { return r.table->name; })
      .def_prop_ro("has_bf16", [](const Runtime& r) { return r.table->has_bf16; })
      .def_prop_ro("has_tiles", [](const Runtime& r) { return r.table->has_tiles; })
      .def_ro("num_threads", &Runtime::num_threads)
      .def("pack_linear", pack, nb::arg("parts"), nb::arg("bias") = nb::none(),
           nb::arg("is_sensitive") = false, nb::arg("activations") = nb::none())
      .def("adopt_linear", adopt, nb::arg("segments"), nb::arg("cols"),
           nb::arg("bias") = nb::none(), nb::arg("is_sensitive") = false,
           nb::arg("activations") = nb::none())
      .def("sample", sample, nb::arg("logits"), nb::arg("params"))
      .def("best_allowed", best_allowed, nb::arg("logits"), nb::arg("logit_rows"),
           nb::arg("mask_words"));
}

}  // namespace caudal

NB_MODULE(_native, m) {
  using namespace caudal;
  bind_runtime(m);
  bind_guesses(m);
  bind_plan(m);
  nb::module_ testing = m.def_submodule("testing");
  bind_testing(testing);
  nb::module_ bench = m.def_submodule("bench");
  bind_bench(bench);
  // While the interpreter is still whole.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(shut_down));
}
