// What the processes of a group do together. Each step ends with all of them agreeing on it, so
// that either all have the new pools or none:
//
//   reserve   begun: all are here            pools: allocated, zeroed, exported
//             opened: everybody's are open   released: those that were replaced are closed
//   rebuild   suspended: no kernel runs and no table leads to a pool; then pools, opened
//   close     released
//
// A process closes what it opened of others at once, and frees its own pools only after a later
// step has shown that all have. Where that step fails they are kept, as orphans, until one
// succeeds. `Agree` says what is told when a step fails.

#include <algorithm>

#include "cuda_group.h"

namespace jax_moe::cuda {

Status Group::Meet(Meeting* meeting, const std::string& phase, const Status& status) {
  if (meeting == nullptr) {
    return {StatusCode::kFailedPrecondition,
            topology_.description + " spans several processes, which must do this together"};
  }
  std::vector<std::string> none;
  JAX_MOE_RETURN_IF_ERROR(Agree(*meeting, topology_.members, phase, status, "", &none));
  // All are past what they did before, so nobody has an orphan's pools open.
  for (auto& orphan : orphans_) JAX_MOE_RETURN_IF_ERROR(orphan->Drain());
  orphans_.clear();
  return {};
}

void Group::Abandon(std::unique_ptr<PoolSet> set) {
  set->ClosePeers();
  orphans_.push_back(std::move(set));
}

Status Group::Share(Meeting& meeting, const std::vector<PoolSet*>& sets, Status status) {
  std::string mine;
  for (const PoolSet* set : sets) {
    if (status.ok()) status = set->Export(&mine);
  }
  std::vector<std::string> exports;
  JAX_MOE_RETURN_IF_ERROR(Agree(meeting, topology_.members, "pools", status, mine, &exports));
  status = Import(sets, exports);
  return Agree(meeting, topology_.members, "opened", status, "", &exports);
}

Status Group::Import(const std::vector<PoolSet*>& sets, const std::vector<std::string>& exports) {
  for (size_t p = 0; p < topology_.members.size(); ++p) {
    const int member = topology_.members[p];
    if (member == topology_.process) continue;
    size_t num_devices = 0;
    for (const auto& instance : topology_.processes) {
      num_devices += std::count(instance.begin(), instance.end(), member);
    }
    size_t at = 0;
    for (PoolSet* set : sets) {
      const size_t bytes = set->export_bytes(num_devices);
      JAX_MOE_RETURN_IF_ERROR(
          set->Import(topology_.processes, member, exports[p].substr(at, bytes)));
      at += bytes;
    }
    if (at != exports[p].size()) {
      return {StatusCode::kFailedPrecondition,
              "process " + std::to_string(member) +
                  " has more pools than this one: all processes must make the same calls"};
    }
  }
  return {};
}

Status Group::ReserveTogether(const PoolSizes& sizes, int64_t lowering, Meeting* meeting) {
  const PoolSizes all = GrowBy(sizes, lowering);
  JAX_MOE_RETURN_IF_ERROR(Meet(meeting, "begun", {}));
  std::unique_ptr<PoolSet> set;
  Status status =
      PoolSet::Allocate(devices_, topology_.num_ranks, topology_.virtual_ranks, all, timeouts_,
                        /*shared=*/true, &set);
  set->lowering = lowering;
  status = Share(*meeting, {set.get()}, status);
  if (status.ok()) status = set->Enable();
  if (!status.ok()) {
    Abandon(std::move(set));
    status.message = topology_.description + ", pool for " + ToString(all) + ": " + status.message;
    return status;
  }
  for (auto& old : Publish(std::move(set))) Abandon(std::move(old));
  Meet(meeting, "released", {});  // only frees memory: what fails here a later meeting mends
  return {};
}

Status Group::CloseTogether(Meeting* meeting) {
  const auto has_pools = [](const auto& set) { return set->has_pools(); };
  if (closed_ && std::none_of(pools_.begin(), pools_.end(), has_pools)) return {};
  Status status = Suspend();
  for (auto& set : pools_) {
    if (status.ok()) status = set->ClosePeers();
  }
  closed_ = true;
  SetState(State::kClosed);
  status = Meet(meeting, "released", status);
  if (!status.ok()) {
    status.message =
        "the group is closed here, but its pools stay allocated until all processes "
        "close or rebuild it: " +
        status.message;
    return status;
  }
  for (auto& set : pools_) JAX_MOE_RETURN_IF_ERROR(set->FreePools());
  return {};
}

Status Group::RebuildTogether(Meeting* meeting) {
  Status status = Suspend();
  closed_ = true;  // until all agree
  SetState(State::kClosed);
  JAX_MOE_RETURN_IF_ERROR(Meet(meeting, "suspended", status));
  std::vector<PoolSet*> sets;
  for (auto& set : pools_) {
    sets.push_back(set.get());
    if (status.ok()) status = set->Prepare(timeouts_);
  }
  JAX_MOE_RETURN_IF_ERROR(Share(*meeting, sets, status));
  for (auto& set : pools_) JAX_MOE_RETURN_IF_ERROR(set->Enable());
  closed_ = false;
  SetState(State::kReady);
  return {};
}

}  // namespace jax_moe::cuda
