// Collectives of these devices: gloo's, on aliases of the memory. Each is over when its call returns, but for send and receive.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "alias.h"

namespace rehearsal {

using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using Work = c10::intrusive_ptr<c10d::Work>;

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
inline Work finished(Work work) {
  work->wait();
  return work;
}

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

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return finished(gloo->broadcast(host, options));
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = on_host(tensors);
    return finished(gloo->allreduce(host, options));
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = on_host(tensors);
    return finished(gloo->allreduce_coalesced(host, options));
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = on_host(tensors);
    return finished(gloo->reduce(host, options));
  }
  Work allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return finished(gloo->allgather(to, from, options));
  }
  Work _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return finished(gloo->_allgather_base(to, from, options));
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return finished(gloo->allgather_into_tensor_coalesced(to, from, options));
  }
  Work gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return finished(gloo->gather(to, from, options));
  }
  Work scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& options) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return finished(gloo->scatter(to, from, options));
  }
  Work reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return finished(gloo->reduce_scatter(to, from, options));
  }
  Work _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return finished(gloo->_reduce_scatter_base(to, from, options));
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return finished(gloo->reduce_scatter_tensor_coalesced(to, from, options));
  }
  Work alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return finished(gloo->alltoall_base(to, from, out_sizes, in_sizes, options));
  }
  Work alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    auto to = on_host(out), from = on_host(in);
    return finished(gloo->alltoall(to, from, options));
  }
  Work send(Tensors& tensors, int rank, int tag) override {
    auto host = on_host(tensors);
    return gloo->send(host, rank, tag);
  }
  Work recv(Tensors& tensors, int rank, int tag) override {
    auto host = on_host(tensors);
    return gloo->recv(host, rank, tag);
  }
  Work recvAnysource(Tensors& tensors, int tag) override {
    auto host = on_host(tensors);
    return gloo->recvAnysource(host, tag);
  }
  Work barrier(const c10d::BarrierOptions&) override { return gloo->barrier(c10d::BarrierOptions()); }
};

}  // namespace rehearsal
