// Work on a chunk gives the same bits as one kernel call per parameter, whatever the pool, and touches nothing else.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/chunk_work.h"

#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ballast/base/random.h"
#include "ballast/kernels/adam.h"
#include "ballast/kernels/reduce.h"

namespace ballast::offload {
namespace {

using kernels::ElementType;
using kernels::ParameterFormat;

// Real threads for the widest pool, also where there are fewer CPUs.
const tbb::global_control kWide(tbb::global_control::max_allowed_parallelism, 8);

constexpr std::uint64_t kSeed = 42;
constexpr std::size_t kPiece = 64 * 1024;

std::vector<std::unique_ptr<CpuPool>> pools() {
  std::vector<std::unique_ptr<CpuPool>> all;
  all.push_back(make_inline_pool());
  for (const int threads : {1, 2, 3, 8}) all.push_back(make_tbb_pool(threads));
  return all;
}

std::size_t bytes_of(ElementType type) { return type == ElementType::fp32 ? 4 : 2; }
// Of the moments of so many elements; 8-bit ones in blocks of 256 bytes and a scale.
std::size_t moment_bytes(ElementType type, std::size_t elements) {
  return type == ElementType::int8 ? (elements + 255) / 256 * 260 : elements * bytes_of(type);
}

kernels::AdamScalars scalars_of(std::uint64_t step, double rate, double scale = 1) {
  return kernels::adam_scalars({rate, 0.9, 0.95, 1e-8, 0.1, true}, step, scale);
}

// Random values in [-1, 1), in the bits of a type.
void fill(std::vector<std::byte>& bytes, std::size_t element, std::uint64_t seed, bool positive = false) {
  for (std::size_t i = 0; i * element < bytes.size(); ++i) {
    float value = static_cast<float>(static_cast<double>(base::random_at(seed, i) >> 11) * 0x1.0p-52 - 1.0);
    if (positive) value = std::fabs(value);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (element == 4) {
      std::memcpy(&bytes[i * 4], &bits, 4);
    } else {
      const auto half = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
}

struct Case {
  ParameterFormat format = ParameterFormat::split_bf16;
  ElementType moments = ElementType::fp32;
  ElementType gradients = ElementType::fp32;
  bool published = true;
};

// A chunk's arrays with values in them.
struct Chunk {
  Chunk(const Case& kind, std::size_t count) : kind_(kind) {
    const std::size_t parameter_size = kind.format == ParameterFormat::fp32 ? 4 : 2;
    const std::size_t master_size = kind.format == ParameterFormat::split_bf16 ? 2
                                    : kind.format == ParameterFormat::fp16     ? 4
                                                                               : 0;
    parameter.resize(count * parameter_size);
    master.resize(count * master_size);
    exp_avg.resize(moment_bytes(kind.moments, count));
    exp_avg_sq.resize(moment_bytes(kind.moments, count));
    gradient.resize(count * bytes_of(kind.gradients));
    published.resize(kind.published ? parameter.size() : 0, std::byte{0xCD});
    fill(parameter, parameter_size, kSeed);
    if (master_size != 0) fill(master, master_size, kSeed + 1);
    // 8-bit moments begin as zeros: random bytes would be scales that are no numbers.
    if (kind.moments != ElementType::int8) {
      fill(exp_avg, bytes_of(kind.moments), kSeed + 2);
      fill(exp_avg_sq, bytes_of(kind.moments), kSeed + 3, true);
    }
    fill(gradient, bytes_of(kind.gradients), kSeed + 4);
  }
  ChunkArrays arrays() {
    ChunkArrays all;
    all.parameter_format = kind_.format;
    all.moment_type = kind_.moments;
    all.gradient_type = kind_.gradients;
    all.parameter = parameter.data();
    all.master = master.empty() ? nullptr : master.data();
    all.exp_avg = exp_avg.data();
    all.exp_avg_sq = exp_avg_sq.data();
    all.gradient = gradient.data();
    all.published = published.empty() ? nullptr : published.data();
    return all;
  }
  // One kernel call for one segment: the reference.
  void update_alone(const UpdateSegment& segment) {
    if (segment.count == 0) return;
    const ChunkArrays all = arrays();
    const std::size_t begin = segment.begin;
    const std::size_t parameter_size = kind_.format == ParameterFormat::fp32 ? 4 : 2;
    kernels::AdamArrays range;
    range.parameter_format = kind_.format;
    range.moment_type = kind_.moments;
    range.gradient_type = kind_.gradients;
    range.parameter = all.parameter + begin * parameter_size;
    if (all.master != nullptr) range.master = all.master + begin * (kind_.format == ParameterFormat::fp16 ? 4 : 2);
    range.exp_avg = all.exp_avg + moment_bytes(kind_.moments, begin);
    range.exp_avg_sq = all.exp_avg_sq + moment_bytes(kind_.moments, begin);
    range.gradient = all.gradient + begin * bytes_of(kind_.gradients);
    if (all.published != nullptr) range.published = all.published + begin * parameter_size;
    kernels::adam(segment.scalars, range, segment.count);
  }
  bool operator==(const Chunk& other) const {
    return parameter == other.parameter && master == other.master && exp_avg == other.exp_avg &&
           exp_avg_sq == other.exp_avg_sq && gradient == other.gradient && published == other.published;
  }

  Case kind_;
  std::vector<std::byte> parameter, master, exp_avg, exp_avg_sq, gradient, published;
};

// The reference updates segments and nothing else, so equality also says that padding and absent parameters stand
// still.
void expect_same_on_every_pool(const Case& kind, std::size_t count, const std::vector<UpdateSegment>& segments) {
  SCOPED_TRACE("seed " + std::to_string(kSeed) +
               ": --gtest_filter=" + testing::UnitTest::GetInstance()->current_test_info()->name());
  const Chunk before(kind, count);
  Chunk expected = before;
  for (const UpdateSegment& segment : segments) expected.update_alone(segment);
  for (const auto& pool : pools()) {
    Chunk chunk = before;
    update_chunk(*pool, chunk.arrays(), segments);
    EXPECT_TRUE(chunk == expected) << "a pool of " << pool->threads();
  }
}

TEST(UpdateChunk, EveryFormatGivesTheBitsOfOneCallPerParameter) {
  const std::size_t count = 3 * kPiece + 1000;
  const std::vector<UpdateSegment> segments = {
      {17, kPiece - 20, scalars_of(1, 1e-3)},              // odd start, ends inside the first piece
      {kPiece + 5, kPiece + 3, scalars_of(7, 2e-3, 0.5)},  // over a border, another group and step
      {2 * kPiece + 64, kPiece + 900, scalars_of(100, 1e-2)}};
  for (const ParameterFormat format : {ParameterFormat::split_bf16, ParameterFormat::fp16, ParameterFormat::fp32}) {
    for (const ElementType moments : {ElementType::fp32, ElementType::bf16}) {
      for (const ElementType gradients : {ElementType::fp32, ElementType::bf16}) {
        for (const bool published : {false, true}) {
          expect_same_on_every_pool({format, moments, gradients, published}, count, segments);
        }
      }
    }
  }
}

// Segments begin with a block; blocks that no segment touches keep their bytes.
TEST(UpdateChunk, EightBitMomentsGiveTheBitsOfOneCallPerParameter) {
  const std::size_t count = 3 * kPiece;
  const std::vector<UpdateSegment> segments = {{256, kPiece - 20, scalars_of(1, 1e-3)},
                                               {kPiece + 512, kPiece + 3, scalars_of(7, 2e-3, 0.5)},
                                               {2 * kPiece + 1024, 1, scalars_of(100, 1e-2)}};
  for (const ParameterFormat format : {ParameterFormat::split_bf16, ParameterFormat::fp16, ParameterFormat::fp32}) {
    for (const ElementType gradients : {ElementType::fp32, ElementType::bf16}) {
      expect_same_on_every_pool({format, ElementType::int8, gradients, true}, count, segments);
    }
  }
}

TEST(UpdateChunk, EverySegmentMovesAndNothingElseDoes) {
  const Case kind{ParameterFormat::fp32, ElementType::fp32, ElementType::fp32, false};
  const std::size_t count = kPiece + 300;
  const Chunk before(kind, count);
  Chunk after = before;
  // Padding at both ends, an absent parameter in the middle, an empty one.
  const std::vector<UpdateSegment> segments = {
      {10, 50, scalars_of(1, 1e-2)}, {60, 0, scalars_of(1, 1e-2)}, {100, kPiece, scalars_of(1, 1e-2)}};
  update_chunk(*make_tbb_pool(2), after.arrays(), segments);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const bool inside = (i >= 10 && i < 60) || (i >= 100 && i < 100 + kPiece);
    const bool moved = std::memcmp(&before.parameter[i * 4], &after.parameter[i * 4], 4) != 0;
    const bool moment_moved = std::memcmp(&before.exp_avg[i * 4], &after.exp_avg[i * 4], 4) != 0;
    if (inside != moved || inside != moment_moved) ++wrong;
  }
  EXPECT_EQ(wrong, 0u);
}

TEST(UpdateChunk, SixHundredTinyParametersGiveTheBitsOfEachAlone) {
  std::vector<UpdateSegment> segments;
  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < 600; ++i) {
    const std::uint64_t size = i % 5 == 0 ? 1 : 1 + base::random_at(kSeed, i) % 300;
    segments.push_back({at, size, scalars_of(1 + i, 1e-3 * static_cast<double>(1 + i % 3))});
    at = (at + size + 63) / 64 * 64;
  }
  expect_same_on_every_pool({}, at, segments);
}

TEST(UpdateChunk, SixtyFourOddSizesEachEqualTheirOwnRun) {
  std::vector<UpdateSegment> segments;
  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < 64; ++i) {
    segments.push_back({at, 2 * i * 97 + 1, scalars_of(1, 1e-3)});
    at += 2 * i * 97 + 1;  // side by side, no padding
  }
  expect_same_on_every_pool({}, at, segments);
}

TEST(UpdateChunk, NothingToUpdateTouchesNothing) {
  expect_same_on_every_pool({}, 100, {});
  expect_same_on_every_pool({}, 100, {{0, 0, scalars_of(1, 1)}, {50, 0, scalars_of(1, 1)}, {100, 0, scalars_of(1, 1)}});
}

TEST(UpdateChunk, AScalarIsOneElement) { expect_same_on_every_pool({}, 1, {{0, 1, scalars_of(1, 1e-2)}}); }

TEST(AccumulateChunk, TheFirstCopiesAndLaterOnesAddOnEveryPool) {
  for (const ElementType type : {ElementType::fp32, ElementType::bf16}) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, kPiece, 2 * kPiece + 77}) {
      std::vector<std::byte> first(count * bytes_of(type));
      std::vector<std::byte> second(count * bytes_of(type));
      fill(first, bytes_of(type), 1);
      fill(second, bytes_of(type), 2);
      std::vector<std::byte> expected = first;
      if (type == ElementType::fp32) {
        kernels::accumulate_fp32(reinterpret_cast<float*>(expected.data()), reinterpret_cast<float*>(second.data()), 1,
                                 count);
      } else {
        kernels::accumulate_bf16(reinterpret_cast<std::uint16_t*>(expected.data()),
                                 reinterpret_cast<std::uint16_t*>(second.data()), 1, count);
      }
      for (const auto& pool : pools()) {
        std::vector<std::byte> sum(count * bytes_of(type), std::byte{0x7F});  // the first must not add
        accumulate_chunk(*pool, type, sum.data(), first.data(), count, true);
        EXPECT_EQ(sum, first);
        accumulate_chunk(*pool, type, sum.data(), second.data(), count, false);
        EXPECT_EQ(sum, expected);
      }
    }
  }
}

TEST(SumSquaresChunk, EachBlockHasTheBitsOfOneCallOnEveryPool) {
  for (const ElementType type : {ElementType::fp32, ElementType::bf16}) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, kPiece, 3 * kPiece + kernels::kSumBlock + 5}) {
      std::vector<std::byte> source(count * bytes_of(type));
      fill(source, bytes_of(type), 3);
      const std::size_t blocks = (count + kernels::kSumBlock - 1) / kernels::kSumBlock;
      std::vector<double> expected(blocks + 1, -1);
      if (type == ElementType::fp32) {
        kernels::sum_of_squares_fp32(reinterpret_cast<float*>(source.data()), count, expected.data());
      } else {
        kernels::sum_of_squares_bf16(reinterpret_cast<std::uint16_t*>(source.data()), count, expected.data());
      }
      for (const auto& pool : pools()) {
        std::vector<double> sums(blocks + 1, -1);  // the last one is beyond the end
        sum_squares_chunk(*pool, type, source.data(), count, sums.data());
        EXPECT_EQ(std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(double)), 0);
      }
    }
  }
}

TEST(SumSquaresChunk, ANonFiniteElementShowsInItsBlockAlone) {
  std::vector<float> source(2 * kPiece, 1.0f);
  source[kPiece + 3] = std::numeric_limits<float>::quiet_NaN();
  std::vector<double> sums(source.size() / kernels::kSumBlock);
  sum_squares_chunk(*make_tbb_pool(2), ElementType::fp32, reinterpret_cast<std::byte*>(source.data()), source.size(),
                    sums.data());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    EXPECT_EQ(std::isfinite(sums[i]), i != kPiece / kernels::kSumBlock) << i;
  }
}

TEST(Checksum, IsTheSameOnEveryPoolAndSeesEveryByte) {
  constexpr std::size_t kHashPiece = 256 * 1024;
  const auto pool = make_inline_pool();
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kHashPiece - 1, kHashPiece, kHashPiece + 1,
                                  5 * kHashPiece + 12345, 257 * kHashPiece + 3}) {
    std::vector<std::byte> data(bytes);
    for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 31 + i / 7919);
    const std::uint64_t expected = checksum(*pool, data.data(), bytes);
    for (const auto& other : pools()) EXPECT_EQ(checksum(*other, data.data(), bytes), expected);
    for (const std::size_t at : {std::size_t{0}, bytes / 2, kHashPiece - 1, kHashPiece, 256 * kHashPiece, bytes - 1}) {
      if (at >= bytes) continue;
      data[at] ^= std::byte{1};
      EXPECT_NE(checksum(*pool, data.data(), bytes), expected) << "byte " << at << " of " << bytes;
      data[at] ^= std::byte{1};
    }
    if (bytes > 0) {
      EXPECT_NE(checksum(*pool, data.data(), bytes - 1), expected);
    }
  }
}

TEST(Checksum, ExchangedPiecesAreSeen) {
  std::vector<std::byte> data(2 * 256 * 1024, std::byte{1});
  std::fill(data.begin() + 256 * 1024, data.end(), std::byte{2});
  const auto pool = make_inline_pool();
  const std::uint64_t before = checksum(*pool, data.data(), data.size());
  std::rotate(data.begin(), data.begin() + 256 * 1024, data.end());
  EXPECT_NE(checksum(*pool, data.data(), data.size()), before);
}

}  // namespace
}  // namespace ballast::offload
