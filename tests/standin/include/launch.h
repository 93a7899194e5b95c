// How kernel bodies run in the stand-in build: one after the other on the host, in order with the stream.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "standin/standin.h"

namespace ballast::kernels::cuda {

template <class Body>
cudaError_t launch_items(const Body& body, std::uint64_t items, cudaStream_t stream) {
  if (items == 0) return cudaSuccess;
  return standin::launch(stream, [own = Body(body), items]() mutable {
    own.visit_pointers(standin::Translate());
    for (std::uint64_t i = 0; i < items; ++i) own(i);
  });
}

template <class Body>
cudaError_t launch_warps(const Body& body, std::uint64_t warps, cudaStream_t stream) {
  if (warps == 0) return cudaSuccess;
  return standin::launch(stream, [own = Body(body), warps]() mutable {
    own.visit_pointers(standin::Translate());
    for (std::uint64_t w = 0; w < warps; ++w) {
      std::array<double, 32> lanes;
      for (unsigned lane = 0; lane < 32; ++lane) lanes[lane] = own.lane(w, lane);
      for (unsigned half = 16; half != 0; half /= 2) {
        for (unsigned lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
      }
      own.finish(w, lanes[0]);
    }
  });
}

}  // namespace ballast::kernels::cuda
