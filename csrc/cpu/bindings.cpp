#include "bindings.h"

namespace caudal {
namespace {

using RawPart = std::tuple<int, int64_t, int64_t, Array<uint8_t, 1>>;

LinearWeight pack(Runtime& runtime, const std::vector<RawPart>& parts,
                  const std::optional<F32Vector>& bias, bool is_sensitive) {
  std::vector<RawMatrix> matrices;
  for (const auto& [type, rows, cols, data] : parts) {
    matrices.push_back({type, rows, cols, data.data(), data.size()});
  }
  LinearWeight weight;
  {
    const ReleaseGil release;
    weight = pack_linear(matrices, runtime.arena, runtime.num_threads);
  }
  if (bias) {
    require(static_cast<int64_t>(bias->size()) == weight.rows, "bias: one value per row is needed");
    weight.bias.assign(bias->data(), bias->data() + bias->size());
  }
  weight.is_wide = is_sensitive || runtime.table->has_cheap_wide;
  return weight;
}

NumpyArray<float> unpack(const LinearWeight& weight) {
  auto out = new_array<float>({static_cast<size_t>(weight.rows), static_cast<size_t>(weight.cols)});
  unpack_linear(weight, out.data());
  return out;
}

std::vector<std::string> segment_formats(const LinearWeight& weight) {
  static constexpr const char* kNames[] = {"w4", "w8", "f16", "f32"};
  std::vector<std::string> names;
  for (const PackedMatrix& segment : weight.segments) {
    names.emplace_back(kNames[static_cast<int>(segment.format)]);
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
      .def_ro("is_wide", &LinearWeight::is_wide)
      .def_prop_ro("has_bias", [](const LinearWeight& w) { return !w.bias.empty(); })
      .def("unpack", unpack);

  nb::class_<Runtime>(m, "Runtime")
      .def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("num_threads"))
      .def_prop_ro("isa", [](const Runtime& r) { return r.table->name; })
      .def_ro("num_threads", &Runtime::num_threads)
      .def("pack_linear", pack, nb::arg("parts"), nb::arg("bias") = nb::none(),
           nb::arg("is_sensitive") = false)
      .def("sample", sample, nb::arg("logits"), nb::arg("params"));
}

}  // namespace caudal

NB_MODULE(_native, m) {
  using namespace caudal;
  bind_runtime(m);
  bind_plan(m);
  nb::module_ testing = m.def_submodule("testing");
  bind_testing(testing);
  nb::module_ bench = m.def_submodule("bench");
  bind_bench(bench);
  // While the interpreter is still whole.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(shut_down));
}
