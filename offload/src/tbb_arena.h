// TbbArena: a loop over numbered pieces on oneTBB. The only door to TBB's headers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace ballast::offload {

class TbbArena {
 public:
  // The threads that TBB may start in this process, the caller's included.
  static int allowed_threads();

  TbbArena(int threads, std::vector<int> keep_on);
  ~TbbArena();
  TbbArena(const TbbArena&) = delete;
  TbbArena& operator=(const TbbArena&) = delete;

  // Calls function(context, piece) once for each piece in [0, pieces) and returns when all are done. The function does
  // not throw.
  void run(std::size_t pieces, void (*function)(void* context, std::size_t piece), void* context);

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace ballast::offload
