// Collectives of these devices: gloo's, on aliases of the memory, over when their call returns but for send and receive. Their
// place in time is NCCL's: on the stream of the caller, or, where they are asynchronous, on one of their own that waits for it and
// for which `wait` makes the caller's wait.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "launch.h"

namespace rehearsal {

using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

inline Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) found.push_back(on_host(tensor));
  return found;
}
inline TensorLists on_host(const TensorLists& lists) {
  TensorLists found;
  for (const auto& list : lists) found.push_back(on_host(list));
  return found;
}
inline Tensors flat(const TensorLists& lists) {
  Tensors found;
  for (const auto& list : lists) found.insert(found.end(), list.begin(), list.end());
  return found;
}

// What is under way on another stream. Keeps the tensors until a stream waits for it; if none does, until it is over.
struct Queued final : c10d::Work {
  WorkPtr gloo;
  c10::Stream stream;
  Clock after;
  Tensors kept;
  bool host_too = false;

  Queued(WorkPtr gloo, c10::Stream stream, Tensors kept)
      : gloo(std::move(gloo)), stream(stream), after(streams.mark(stream).clock), kept(std::move(kept)) {}
  ~Queued() override {
    for (const auto& tensor : kept) record_stream(tensor.storage().data_ptr(), stream);
  }

  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  int sourceRank() const override { return gloo->sourceRank(); }
  Tensors result() override { return gloo->result(); }
  void abort() override { gloo->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return gloo->getFuture(); }
  uint64_t getSequencenumber() const override { return gloo->getSequencenumber(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    bool done = gloo->wait(timeout);
    streams.wait(current_stream(stream.device()), after);
    if (host_too) host_learns(after);
    kept.clear();
    return done;
  }
};

struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return whole("broadcast", options.asyncOp, {}, tensors, [&] {
      auto host = on_host(tensors);
      return gloo->broadcast(host, options);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return whole("allreduce", options.asyncOp, {}, tensors, [&] {
      auto host = on_host(tensors);
      return gloo->allreduce(host, options);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return whole("allreduce_coalesced", options.asyncOp, {}, tensors, [&] {
      auto host = on_host(tensors);
      return gloo->allreduce_coalesced(host, options);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return whole("reduce", options.asyncOp, {}, tensors, [&] {
      auto host = on_host(tensors);
      return gloo->reduce(host, options);
    });
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return whole("allgather", options.asyncOp, in, flat(out), [&] {
      auto to = on_host(out);
      auto from = on_host(in);
      return gloo->allgather(to, from, options);
    });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    return whole("_allgather_base", options.asyncOp, {in}, {out}, [&] {
      auto to = on_host(out), from = on_host(in);
      return gloo->_allgather_base(to, from, options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return whole("allgather_into_tensor_coalesced", options.asyncOp, in, out, [&] {
      auto to = on_host(out), from = on_host(in);
      return gloo->allgather_into_tensor_coalesced(to, from, options);
    });
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& options) override {
    return whole("gather", options.asyncOp, in, flat(out), [&] {
      auto to = on_host(out);
      auto from = on_host(in);
      return gloo->gather(to, from, options);
    });
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& options) override {
    return whole("scatter", options.asyncOp, flat(in), out, [&] {
      auto to = on_host(out);
      auto from = on_host(in);
      return gloo->scatter(to, from, options);
    });
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& options) override {
    return whole("reduce_scatter", options.asyncOp, flat(in), out, [&] {
      auto to = on_host(out);
      auto from = on_host(in);
      return gloo->reduce_scatter(to, from, options);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return whole("_reduce_scatter_base", options.asyncOp, {in}, {out}, [&] {
      auto to = on_host(out), from = on_host(in);
      return gloo->_reduce_scatter_base(to, from, options);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    return whole("reduce_scatter_tensor_coalesced", options.asyncOp, in, out, [&] {
      auto to = on_host(out), from = on_host(in);
      return gloo->reduce_scatter_tensor_coalesced(to, from, options);
    });
  }
  WorkPtr alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    return whole("alltoall_base", options.asyncOp, {in}, {out}, [&] {
      auto to = on_host(out), from = on_host(in);
      return gloo->alltoall_base(to, from, out_sizes, in_sizes, options);
    });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return whole("alltoall", options.asyncOp, in, out, [&] {
      auto to = on_host(out), from = on_host(in);
      return gloo->alltoall(to, from, options);
    });
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    return queue("send", own("send", rank), tensors, {}, [&] {
      auto host = on_host(tensors);
      return gloo->send(host, rank, tag);
    });
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return queue("recv", own("recv", rank), {}, tensors, [&] {
      auto host = on_host(tensors);
      return gloo->recv(host, rank, tag);
    });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return queue("recvAnysource", own("recv", -1), {}, tensors, [&] {
      auto host = on_host(tensors);
      return gloo->recvAnysource(host, tag);
    });
  }
  // The host waits for it.
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto work = whole("barrier", true, {}, {}, [&] { return gloo->barrier(c10d::BarrierOptions()); });
    static_cast<Queued*>(work.get())->host_too = true;
    return work;
  }

 private:
  // Of this group: one for collectives, and one for each direction and peer, none of which NCCL orders with another.
  c10::Stream own(const std::string& purpose, int peer = 0) {
    std::lock_guard<std::mutex> held(lock_);
    auto& found = own_[{purpose, peer, current_device}];
    if (!found) found = streams.next(c10::Device(CUDA));
    return *found;
  }

  template <class Run>
  WorkPtr whole(const std::string& name, bool async, const Tensors& in, const Tensors& out, Run run) {
    auto stream = async ? own("collectives") : current_stream(c10::Device(CUDA));
    return queue(name, stream, in, out, [&] {
      auto work = run();
      work->wait();
      return work;
    });
  }

  template <class Run>
  WorkPtr queue(const std::string& name, c10::Stream stream, const Tensors& in, const Tensors& out, Run run) {
    auto callers = current_stream(stream.device());
    if (stream != callers) streams.wait(stream, callers);
    Launch launch(name, stream);
    for (const auto& tensor : in) launch.reads(tensor);
    for (const auto& tensor : out) launch.writes(tensor);
    Tensors kept;
    if (stream != callers)
      for (const auto* tensors : {&in, &out}) kept.insert(kept.end(), tensors->begin(), tensors->end());
    return c10::make_intrusive<Queued>(run(), stream, std::move(kept));
  }

  std::mutex lock_;
  std::map<std::tuple<std::string, int, c10::DeviceIndex>, std::optional<c10::Stream>> own_;
};

}  // namespace rehearsal
