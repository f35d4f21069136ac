// The device as one library and one module of Python; each header has one part of it.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/Storage.h>

#include <pybind11/chrono.h>

#include "collectives.h"
#include "fallback.h"
#include "guard.h"
#include "hooks.h"
#include "memory.h"
#include "operators.h"
#include "pinned.h"
#include "streams.h"
#include "waits.h"

namespace {

PyObject* told = nullptr;  // called with the kind of a wait

void tell_python(const char* kind) {
  if (!Py_IsInitialized()) return;
  py::gil_scoped_acquire held;
  if (told) py::reinterpret_borrow<py::object>(told)(kind);
}

void tell(py::object callable) {
  Py_XDECREF(told);
  told = callable.is_none() ? nullptr : callable.release().ptr();
  rehearsal::wait_listener = told ? &tell_python : nullptr;
}

c10::Device device_of(int index) { return rehearsal::whole({rehearsal::CUDA, static_cast<c10::DeviceIndex>(index)}); }

py::tuple packed(c10::Stream stream) {
  auto parts = stream.pack3();
  return py::make_tuple(parts.stream_id, parts.device_index, static_cast<int64_t>(parts.device_type));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  py::class_<rehearsal::Collectives, c10::intrusive_ptr<rehearsal::Collectives>>(
      module, "Collectives", py::module::import("torch._C._distributed_c10d").attr("Backend"))
      .def(py::init([](py::object store, int rank, int size, py::object options) {
        // Where torch looks it up, so that it has as many threads as groups of gloo have that are opened now.
        auto gloo = py::module::import("torch.distributed.distributed_c10d").attr("ProcessGroupGloo");
        auto made = gloo(store, rank, size, py::arg("timeout") = options.attr("_timeout"));
        return c10::make_intrusive<rehearsal::Collectives>(made.cast<Backend>());
      }))
      .def("_set_default_timeout", &rehearsal::Collectives::setTimeout)
      .def_property_readonly("options", [](rehearsal::Collectives& self) { return self.gloo->getBackendOptions(); });
  module.def("listen", &tell);
  module.def("set_count", [](int count) { rehearsal::device_count = static_cast<c10::DeviceIndex>(count); });
  module.def("count", [] { return static_cast<int>(rehearsal::device_count.load()); });
  module.def("current", [] { return static_cast<int>(rehearsal::current_device); });
  module.def("set_current", [](int device) { rehearsal::current_device = static_cast<c10::DeviceIndex>(device); });
  module.def("synchronize", [] {
    py::gil_scoped_release free;
    rehearsal::host_waits("synchronize", rehearsal::streams.all(rehearsal::whole(c10::Device(rehearsal::CUDA))));
  });
  module.def("current_stream", [](int device) { return packed(rehearsal::current_stream(device_of(device))); });
  module.def("default_stream", [](int device) { return packed(c10::Stream(c10::Stream::DEFAULT, device_of(device))); });
  module.def("set_stream", [](int64_t stream_id, int64_t device_index, int64_t device_type) {
    rehearsal::current_device = static_cast<c10::DeviceIndex>(device_index);
    rehearsal::current_streams[device_index] = stream_id;
  }, py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"));
  module.def("default_generator", [](int device) { return at::detail::getCUDAHooks().getDefaultGenerator(device); });
  module.def("allocated", [] { return rehearsal::counters.allocated.load(); });
  module.def("peak", [] { return rehearsal::counters.peak.load(); });
  module.def("reset_peak", [] { rehearsal::counters.peak = rehearsal::counters.allocated.load(); });
  module.def("resize_storage", [](const at::Tensor& whole, size_t bytes) {
    rehearsal::resize_storage(*whole.storage().unsafeGetStorageImpl(), bytes);
  });
}
