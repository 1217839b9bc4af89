#include "cuda_group.h"

#include <algorithm>

#include "cuda_report.h"

namespace jax_moe::cuda {

namespace {

PoolSizes Union(const PoolSizes& a, const PoolSizes& b) {
  return {std::max(a.tokens, b.tokens), std::max(a.top_k, b.top_k),
          std::max(a.num_experts, b.num_experts), std::max(a.payload_bytes, b.payload_bytes)};
}

ptx::CallShape LargestCall(const Topology& topology, const PoolSizes& sizes) {
  ptx::CallShape shape{};
  shape.num_ranks = topology.num_ranks;
  shape.num_tokens = sizes.tokens;
  shape.topk = sizes.top_k;
  shape.num_experts = sizes.num_experts;
  shape.payload_bytes = sizes.payload_bytes;
  return shape;
}

}  // namespace

Status Group::Create(Topology topology, const Timeouts& timeouts, std::shared_ptr<Group>* group) {
  std::shared_ptr<Group> created(new Group(std::move(topology), timeouts));
  JAX_MOE_RETURN_IF_ERROR(created->Open());
  *group = std::move(created);
  return {};
}

Status Group::Open() {
  for (size_t i = 0; i < topology_.instances.size(); ++i) {
    Instance& instance = devices_.emplace_back();
    for (const int ordinal : topology_.instances[i]) {
      if (!topology_.is_local(i, instance.size())) {
        instance.push_back(nullptr);
        continue;
      }
      auto slot = std::make_unique<Slot>();
      slot->ordinal = ordinal;
      slot->instance = static_cast<int>(i);
      slot->index = static_cast<int>(instance.size());
      slots_.push_back(std::move(slot));
      JAX_MOE_RETURN_IF_ERROR(Device::Get(ordinal, &instance.emplace_back()));
    }
    std::vector<std::pair<int, int>> refused;
    JAX_MOE_RETURN_IF_ERROR(EnablePeers(instance, &refused));
    if (refused.empty()) continue;
    std::string pairs;
    for (auto [from, to] : refused) {
      pairs += (pairs.empty() ? "" : ", ") + std::to_string(from) + " -> " + std::to_string(to);
    }
    return {StatusCode::kUnimplemented, "these GPUs cannot reach each other's memory: " + pairs};
  }
  return {};
}

Status Group::CheckCall(const Call& call) {
  JAX_MOE_RETURN_IF_ERROR(CheckLimits(call));
  LaunchShape shape;
  for (const auto& slot : slots_) {
    JAX_MOE_RETURN_IF_ERROR(
        ChooseLaunch(devices_[slot->instance], call, &shape, topology_.processes_per_gpu));
  }
  return {};
}

PoolSet* Group::FindRoom(const PoolSizes& sizes) const {
  for (const auto& set : pools_) {
    if (set->layout().Fits(LargestCall(topology_, sizes))) return set.get();
  }
  return nullptr;
}

bool Group::IsReplaceable(const PoolSet& set, int64_t lowering) const {
  if (topology_.spans_processes()) return lowering != 0 && set.lowering == lowering;
  return !set.is_used();
}

PoolSizes Group::GrowBy(const PoolSizes& sizes, int64_t lowering) const {
  PoolSizes all = sizes;
  for (const auto& set : pools_) {
    if (IsReplaceable(*set, lowering)) all = Union(all, set->sizes());
  }
  return all;
}

uint64_t Group::MissingBytes(const PoolSizes& sizes, int64_t lowering) {
  const std::lock_guard<std::mutex> lock(eager_mutex_);
  if (FindRoom(sizes) != nullptr) return 0;
  return uint64_t{topology_.virtual_ranks} *
         LayoutOf(topology_.num_ranks, GrowBy(sizes, lowering)).size;
}

Status Group::Reserve(const PoolSizes& sizes, int64_t lowering, Meeting* meeting) {
  const std::lock_guard<std::mutex> lock(eager_mutex_);
  if (FindRoom(sizes) != nullptr) return {};
  if (topology_.spans_processes()) return ReserveTogether(sizes, lowering, meeting);
  const PoolSizes all = GrowBy(sizes, lowering);
  std::unique_ptr<PoolSet> set;
  Status status =
      PoolSet::Create(devices_, topology_.num_ranks, topology_.virtual_ranks, all, timeouts_, &set);
  if (!status.ok()) {
    status.message = topology_.description + ", pool for " + ToString(all) + ": " + status.message;
    return status;
  }
  // Freeing is as allocating, see PoolSet::Allocate: nothing may be running, and no handler may
  // wait for this.
  for (auto& old : Publish(std::move(set))) old->Drain();
  return {};
}

std::vector<std::unique_ptr<PoolSet>> Group::Publish(std::unique_ptr<PoolSet> set) {
  std::vector<std::unique_ptr<PoolSet>> unused;
  {
    // All devices change over at once: a call must find the same pool set on each of them.
    std::vector<std::unique_lock<std::mutex>> locks;
    for (auto& slot : slots_) locks.emplace_back(slot->mutex);
    std::vector<std::unique_ptr<PoolSet>> kept;
    // No launch has seen an unused set, so no CUDA graph holds its addresses.
    for (auto& old : pools_) {
      (IsReplaceable(*old, set->lowering) ? unused : kept).push_back(std::move(old));
    }
    kept.push_back(std::move(set));
    pools_ = std::move(kept);
    for (auto& slot : slots_) {
      slot->pools.clear();
      for (auto& pool : pools_) slot->pools.push_back(pool.get());
    }
  }
  return unused;
}

void Group::SetState(State state) {
  for (auto& slot : slots_) {
    const std::lock_guard<std::mutex> lock(slot->mutex);
    slot->state = state;
  }
}

Status Group::Suspend() {
  for (auto& set : pools_) set->SetAbort(true);  // so that no launch below waits for a full queue
  SetState(State::kChanging);
  for (auto& set : pools_) JAX_MOE_RETURN_IF_ERROR(set->Suspend());
  known_faults_.clear();
  return {};
}

Status Group::Close(Meeting* meeting) {
  const std::lock_guard<std::mutex> lock(eager_mutex_);
  if (topology_.spans_processes()) return CloseTogether(meeting);
  if (closed_) return {};
  JAX_MOE_RETURN_IF_ERROR(Suspend());
  for (auto& set : pools_) JAX_MOE_RETURN_IF_ERROR(set->FreePools());
  closed_ = true;
  SetState(State::kClosed);
  return {};
}

Status Group::Rebuild(Meeting* meeting) {
  const std::lock_guard<std::mutex> lock(eager_mutex_);
  return topology_.spans_processes() ? RebuildTogether(meeting) : RebuildLocked();
}

Status Group::RebuildLocked() {
  JAX_MOE_RETURN_IF_ERROR(Suspend());
  for (auto& set : pools_) JAX_MOE_RETURN_IF_ERROR(set->Restore(timeouts_));
  closed_ = false;
  SetState(State::kReady);
  return {};
}

Status Group::EnsureUsable() {
  if (topology_.spans_processes()) return {};
  const std::lock_guard<std::mutex> lock(eager_mutex_);
  bool broken = closed_;
  ForEachRecord([&](PoolSet*, int, int, uint32_t, const ptx::Record&) { broken = true; });
  return broken ? RebuildLocked() : Status{};
}

void Group::SetTimeouts(const Timeouts& timeouts) {
  const std::lock_guard<std::mutex> lock(eager_mutex_);
  timeouts_ = timeouts;
  for (auto& set : pools_) set->SetTimeouts(timeouts);
}

template <typename Function>
void Group::ForEachRecord(Function function) {
  for (auto& set : pools_) {
    for (auto& slot : slots_) {
      for (uint32_t v = 0; v < topology_.virtual_ranks; ++v) {
        ptx::Record record;
        if (!set->at(slot->instance, slot->index).ReadRecord(v, &record)) continue;
        function(set.get(), slot->instance, slot->index, v, record);
      }
    }
  }
}

std::string Group::Describe(const ptx::Record& record, int instance) const {
  return cuda::Describe(
      record, {topology_.description, instance, static_cast<int>(topology_.instances.size()),
               topology_.instances[instance], topology_.virtual_ranks,
               topology_.spans_processes() ? topology_.processes[instance] : std::vector<int>{}});
}

std::vector<std::string> Group::Faults() {
  const std::lock_guard<std::mutex> lock(eager_mutex_);
  std::vector<std::string> faults;
  if (closed_) return {topology_.description + " is closed: call rebuild() on it"};
  ForEachRecord([&](PoolSet*, int instance, int, uint32_t, const ptx::Record& record) {
    faults.push_back(Describe(record, instance));
  });
  return faults;
}

std::vector<std::string> Group::TakeNewFaults() {
  const std::unique_lock<std::mutex> lock(eager_mutex_, std::try_to_lock);
  std::vector<std::string> faults;
  if (!lock.owns_lock() || closed_) return faults;
  ForEachRecord([&](PoolSet* set, int instance, int index, uint32_t v, const ptx::Record& record) {
    if (!known_faults_.emplace(set, instance, index, v).second) return;
    faults.push_back(Describe(record, instance));
    // The kernels spread the word within the pool set; the group's other sets hear it from here.
    for (auto& other : pools_) {
      if (other.get() != set) other->Break(record.rank);
    }
  });
  return faults;
}

std::vector<uint64_t> Group::WaitedNs() {
  const std::lock_guard<std::mutex> lock(eager_mutex_);
  const size_t ranks = topology_.num_ranks;
  std::vector<uint64_t> waited(topology_.instances.size() * ABI_NUM_OPERATIONS * ranks * ranks);
  for (auto& slot : slots_) {
    for (uint32_t v = 0; v < topology_.virtual_ranks; ++v) {
      const size_t rank = slot->index * topology_.virtual_ranks + v;
      for (int operation = 1; operation <= ABI_NUM_OPERATIONS; ++operation) {
        uint64_t* row =
            waited.data() +
            ((slot->instance * ABI_NUM_OPERATIONS + operation - 1) * ranks + rank) * ranks;
        for (auto& set : pools_) {
          const DevicePools& part = set->at(slot->instance, slot->index);
          for (size_t peer = 0; peer < ranks; ++peer) {
            row[peer] += part.WaitedNs(v, operation, static_cast<uint32_t>(peer));
          }
        }
      }
    }
  }
  return waited;
}

Status Group::Launch(int ordinal, Call call, const std::array<const void*, kNumArrays>& arrays,
                     Stream stream) {
  const auto found = std::find_if(slots_.begin(), slots_.end(),
                                  [&](const auto& slot) { return slot->ordinal == ordinal; });
  if (found == slots_.end()) {
    return {StatusCode::kFailedPrecondition,
            topology_.description + " has no GPU " + std::to_string(ordinal) +
                ": run the program on the devices of the group's mesh"};
  }
  Slot& slot = **found;
  call.shape.first_rank = slot.index * topology_.virtual_ranks;
  const Instance& instance = devices_[slot.instance];
  LaunchShape shape;
  JAX_MOE_RETURN_IF_ERROR(CheckLimits(call));
  JAX_MOE_RETURN_IF_ERROR(ChooseLaunch(instance, call, &shape, topology_.processes_per_gpu));
  const std::lock_guard<std::mutex> lock(slot.mutex);
  if (slot.state != State::kReady) {
    return {StatusCode::kFailedPrecondition,
            topology_.description + (slot.state == State::kClosed
                                         ? " is closed: call rebuild() on it"
                                         : " is being closed or rebuilt: wait for that")};
  }
  const auto set = std::find_if(slot.pools.begin(), slot.pools.end(),
                                [&](PoolSet* pool) { return pool->layout().Fits(call.shape); });
  if (set == slot.pools.end()) {
    const PoolSizes need{call.shape.num_tokens, call.shape.topk, call.shape.num_experts,
                         call.shape.payload_bytes};
    return {StatusCode::kFailedPrecondition,
            topology_.description + " has no pool with room for a call of " + ToString(need) +
                "; programs that were not lowered in this process need group.reserve(...) first"};
  }
  (*set)->MarkUsed();
  const DevicePools& part = (*set)->at(slot.instance, slot.index);
  ptx::Params params = ptx::MakeParams(call.shape, (*set)->layout(), shape.blocks_per_rank,
                                       shape.link_blocks, shape.chunk_tokens);
  params.pools = part.table();
  params.report = part.report();
  for (int i = 0; i < kNumArrays; ++i) params.arrays[i] = reinterpret_cast<uintptr_t>(arrays[i]);
  JAX_MOE_RETURN_IF_ERROR(LaunchKernel(*instance[slot.index], call.operation,
                                       topology_.virtual_ranks, shape, params, stream));
  ++num_launches_;
  return {};
}

}  // namespace jax_moe::cuda
