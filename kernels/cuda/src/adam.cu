// Adam on the device: one launch for up to kSegmentsPerLaunch segments, one instance per combination of formats.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/kernels/cuda.h>
#include <launch.h>

#include "adam_body.h"

namespace ballast::kernels::cuda {
namespace {

bool aligned16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

template <ParameterFormat kFormat, ElementType kMoment, ElementType kGradient, bool kL2>
cudaError_t launch(const AdamArrays& a, const AdamSegment* segments, unsigned count, cudaStream_t stream) {
  using Body = AdamBody<kFormat, kMoment, kGradient, kL2>;
  Body body;
  body.parameter = static_cast<typename Body::Parameter*>(a.parameter);
  body.master = static_cast<typename Body::Master*>(a.master);
  body.exp_avg = static_cast<typename Body::Moment*>(a.exp_avg);
  body.exp_avg_sq = static_cast<typename Body::Moment*>(a.exp_avg_sq);
  body.gradient = static_cast<const typename Body::Gradient*>(a.gradient);
  body.published = static_cast<typename Body::Parameter*>(a.published);
  body.origin = segments[0].begin / kVector * kVector;
  body.aligned = aligned16(a.parameter) && aligned16(a.master) && aligned16(a.exp_avg) && aligned16(a.exp_avg_sq) &&
                 aligned16(a.gradient) && aligned16(a.published);
  body.segment_count = count;
  for (unsigned i = 0; i < count; ++i) body.segments[i] = segments[i];
  const std::uint64_t end = segments[count - 1].begin + segments[count - 1].count;
  return launch_items(body, (end - body.origin + kVector - 1) / kVector, stream);
}

template <ParameterFormat kFormat, ElementType kMoment, ElementType kGradient>
cudaError_t launch_decay(const AdamArrays& a, const AdamSegment* segments, unsigned count, cudaStream_t stream) {
  // Without L2 the term is left out: 0 * p is NaN where p is infinite.
  return segments[0].scalars.l2_decay != 0.0f ? launch<kFormat, kMoment, kGradient, true>(a, segments, count, stream)
                                              : launch<kFormat, kMoment, kGradient, false>(a, segments, count, stream);
}

template <ParameterFormat kFormat, ElementType kMoment>
cudaError_t launch_gradient(const AdamArrays& a, const AdamSegment* segments, unsigned count, cudaStream_t stream) {
  return a.gradient_type == ElementType::fp32
             ? launch_decay<kFormat, kMoment, ElementType::fp32>(a, segments, count, stream)
             : launch_decay<kFormat, kMoment, ElementType::bf16>(a, segments, count, stream);
}

template <ParameterFormat kFormat>
cudaError_t launch_moment(const AdamArrays& a, const AdamSegment* segments, unsigned count, cudaStream_t stream) {
  return a.moment_type == ElementType::fp32 ? launch_gradient<kFormat, ElementType::fp32>(a, segments, count, stream)
                                            : launch_gradient<kFormat, ElementType::bf16>(a, segments, count, stream);
}

cudaError_t launch_format(const AdamArrays& a, const AdamSegment* segments, unsigned count, cudaStream_t stream) {
  switch (a.parameter_format) {
    case ParameterFormat::split_bf16:
      return launch_moment<ParameterFormat::split_bf16>(a, segments, count, stream);
    case ParameterFormat::fp16:
      return launch_moment<ParameterFormat::fp16>(a, segments, count, stream);
    case ParameterFormat::fp32:
      break;
  }
  return launch_moment<ParameterFormat::fp32>(a, segments, count, stream);
}

}  // namespace

int adam(const AdamArrays& arrays, const AdamSegment* segments, std::size_t segment_count, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  for (std::size_t i = 0; i < segment_count;) {
    if (segments[i].count == 0) {
      ++i;
      continue;
    }
    // As many as fit one launch and agree on the kind of decay.
    const bool l2 = segments[i].scalars.l2_decay != 0.0f;
    std::size_t end = i + 1;
    while (end < segment_count && end - i < kSegmentsPerLaunch && (segments[end].scalars.l2_decay != 0.0f) == l2) ++end;
    const cudaError_t result = launch_format(arrays, segments + i, static_cast<unsigned>(end - i), on);
    if (result != cudaSuccess) return static_cast<int>(result);
    i = end;
  }
  return static_cast<int>(cudaSuccess);
}

}  // namespace ballast::kernels::cuda
