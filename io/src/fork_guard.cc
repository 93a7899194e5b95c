// The list of guarded descriptors, closed in a child by a fork handler.
// SPDX-License-Identifier: Apache-2.0
#include "fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace ballast::io {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<int> descriptors;
  unsigned generation = 0;  // the number of forks between the first process and this one
};

// Never destroyed: fork handlers outlive every static destructor.
Registry& registry() {
  static Registry* const instance = [] {
    auto* made = new Registry;
    // Holding the mutex over the fork gives the child a consistent list and an unlocked mutex.
    ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                     [] {
                       Registry& here = registry();
                       for (const int descriptor : here.descriptors) ::close(descriptor);
                       here.descriptors.clear();
                       ++here.generation;
                       here.mutex.unlock();
                     });
    return made;
  }();
  return *instance;
}

}  // namespace

int ForkGuard::open(const std::function<int()>& open_descriptor) {
  release();
  Registry& list = registry();
  const std::lock_guard lock(list.mutex);
  list.descriptors.reserve(list.descriptors.size() + 1);
  const int descriptor = open_descriptor();
  if (descriptor >= 0) {
    list.descriptors.push_back(descriptor);
    descriptor_ = descriptor;
    generation_ = list.generation;
  }
  return descriptor;
}

void ForkGuard::release() {
  if (descriptor_ < 0) return;
  Registry& list = registry();
  const std::lock_guard lock(list.mutex);
  if (generation_ == list.generation) {
    const auto place = std::find(list.descriptors.begin(), list.descriptors.end(), descriptor_);
    if (place != list.descriptors.end()) list.descriptors.erase(place);
  }
  descriptor_ = -1;
}

bool ForkGuard::owned_here() const {
  Registry& list = registry();
  const std::lock_guard lock(list.mutex);
  return generation_ == list.generation;
}

}  // namespace ballast::io
