// Races: two operators use the same bytes, one of them writes, and the later one was not told to wait for the earlier one.
#pragma once

#include <c10/util/Exception.h>

#include <unordered_set>

#include "streams.h"

namespace rehearsal {

struct Access {
  Moment when;
  uintptr_t from, to;  // addresses; all between the first and the last byte of a tensor
  bool writes;
  const std::string* by;
  bool before_free = false;  // by an earlier owner of the memory
};

inline const std::string* interned(const std::string& name) {
  static std::mutex lock;
  static auto* names = new std::unordered_set<std::string>();
  std::lock_guard<std::mutex> held(lock);
  return &*names->insert(name).first;
}

// Uses of one block that a later one may have to wait for. Guarded by `races`.
class Past {
 public:
  // The first one that `now` does not know to be over.
  const Access* unordered(const Access& now, const Clock& known) const {
    for (const auto& before : accesses)
      if (before.from < now.to && now.from < before.to && (before.writes || now.writes) && !known.knows(before.when)) return &before;
    return nullptr;
  }

  // What `now` has waited for need not be known any more: who waits for `now` has waited for it too.
  void add(const Access& now, const Clock& known) {
    std::erase_if(accesses, [&](const Access& before) {
      return now.from <= before.from && before.to <= now.to && (now.writes || !before.writes) && known.knows(before.when);
    });
    if (accesses.size() >= MOST) merge();
    accesses.push_back(now);
  }

  std::vector<Access> accesses;

 private:
  static constexpr size_t MOST = 128;

  // One for each stream and kind, from the first to the last byte.
  void merge() {
    std::map<std::pair<size_t, bool>, Access> wide;
    for (const auto& one : accesses) {
      auto& kept = wide.try_emplace({one.when.stream, one.writes}, one).first->second;
      auto from = std::min(kept.from, one.from), to = std::max(kept.to, one.to);
      if (kept.when.time < one.when.time) kept = one;
      kept.from = from, kept.to = to;
    }
    accesses.clear();
    for (const auto& [_, one] : wide) accesses.push_back(one);
  }
};

inline std::mutex races;

// Memory that was freed while a stream still used it, other than the one that it was allocated for: the next owner, which gets it
// without any wait, may be the first one to write to it. By the stream of the allocation; guarded by `races`.
class Orphans {
 public:
  void add(size_t stream, const Past& past, const Clock& known, const std::vector<size_t>& recorded) {
    for (auto access : past.accesses) {
      if (known.knows(access.when) || std::count(recorded.begin(), recorded.end(), access.when.stream)) continue;
      access.from = 0, access.to = UINTPTR_MAX, access.before_free = true;
      auto& all = of_[stream];
      std::erase_if(all, [&](const Access& one) { return one.when.stream == access.when.stream && one.writes == access.writes; });
      all.push_back(access);
    }
  }
  std::vector<Access> of(size_t stream, const Clock& known) {
    auto found = of_.find(stream);
    if (found == of_.end()) return {};
    std::erase_if(found->second, [&](const Access& one) { return known.knows(one.when); });
    return found->second;
  }

 private:
  std::map<size_t, std::vector<Access>> of_;
};

inline Orphans& orphans() {
  static auto* orphans = new Orphans();  // never destroyed: tensors may outlive everything else
  return *orphans;
}

inline std::string told(const Access& now, const Access& before, c10::IntArrayRef shape) {
  auto kind = std::string(now.writes ? "write" : "read") + " after " + (before.writes ? "write" : "read");
  auto what = before.before_free ? "memory that was freed while it was in use" : "a tensor";
  std::ostringstream text;
  text << "race (" << kind << "): " << *now.by << " on " << streams.name(now.when.stream) << (now.writes ? " writes " : " reads ") << what
       << " of shape " << shape << ", and has not waited for " << *before.by << " on " << streams.name(before.when.stream) << ", which "
       << (before.writes ? "writes it" : "reads it")
       << (before.before_free ? "; record_stream, or a wait before it is freed, is missing" : "");
  return text.str();
}

}  // namespace rehearsal
