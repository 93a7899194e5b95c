// The loops of kernels/cuda against those of the CPU: the same bits, for every combination of formats, for counts that
// fill no vector and arrays that are not aligned to one. Over the stand-in (the bodies), and on a GPU (the launches).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/random.h>
#include <ballast/cuda/cuda_device.h>
#include <ballast/kernels/adam.h>
#include <ballast/kernels/convert.h>
#include <ballast/kernels/cuda.h>
#include <ballast/kernels/reduce.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace ballast::kernels {
namespace {

// Values of all sizes, signs and kinds; every 97th is special.
inline float any_value(std::uint64_t seed, std::uint64_t i, bool finite) {
  const std::uint64_t bits = base::random_at(seed, i);
  if (i % 97 == 13) {
    const float special[] = {0.0f,
                             -0.0f,
                             1e-42f,
                             -3e-40f,
                             std::numeric_limits<float>::max(),
                             1e-20f,
                             finite ? 1.0f : INFINITY,
                             finite ? -1.0f : -INFINITY};
    return special[bits % 8];
  }
  return std::ldexp(static_cast<float>(static_cast<std::int64_t>(bits) >> 40), -23 - static_cast<int>(bits % 24));
}

class DeviceKernelsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (ballast::cuda::device_count() == 0) GTEST_SKIP() << "there is no CUDA device on this machine";
    device_ = ballast::cuda::make_cuda_device();
    stream_ = device_->make_stream("kernels");
    slab_ = device_->take_slab(kSlabBytes);
  }

  // Room for `bytes` on the device, `shift` bytes off a 256-byte border; filled from `data` where given.
  std::byte* place(std::size_t bytes, std::size_t shift, const void* data = nullptr) {
    std::byte* const at = slab_ + used_ + shift;
    used_ += (bytes + shift + 255) / 256 * 256;
    EXPECT_LE(used_, kSlabBytes);
    if (data != nullptr) stream_->copy(at, data, bytes);
    return at;
  }
  template <class T>
  std::vector<T> fetch(const std::byte* at, std::size_t count) {
    std::vector<T> result(count);
    stream_->copy(result.data(), at, count * sizeof(T));
    stream_->synchronize();
    return result;
  }
  void start() { used_ = 0; }
  void* on() { return stream_->native_handle(); }

  // The same bits, but of a NaN only that it is one.
  static bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b, bool fp32) {
    if (a.size() != b.size()) return false;
    if (std::memcmp(a.data(), b.data(), a.size()) == 0) return true;
    if (!fp32) return false;
    for (std::size_t i = 0; i + 4 <= a.size(); i += 4) {
      float x, y;
      std::memcpy(&x, a.data() + i, 4);
      std::memcpy(&y, b.data() + i, 4);
      if (std::memcmp(&x, &y, 4) != 0 && !(std::isnan(x) && std::isnan(y))) return false;
    }
    return true;
  }

  static constexpr std::size_t kSlabBytes = 8 << 20;
  std::unique_ptr<offload::Device> device_;
  std::unique_ptr<offload::Stream> stream_;
  std::byte* slab_ = nullptr;
  std::size_t used_ = 0;
};

TEST_F(DeviceKernelsTest, AdamGivesTheBitsOfTheCpuInEveryFormat) {
  struct Array {
    std::vector<std::byte> host;
    std::byte* device = nullptr;
  };
  constexpr std::size_t kCount = 3001;
  for (int format = 0; format < 3; ++format) {
    for (int types = 0; types < 16; ++types) {
      for (const std::size_t shift : {std::size_t{0}, std::size_t{4}}) {
        SCOPED_TRACE("format " + std::to_string(format) + ", types " + std::to_string(types) + ", shift " +
                     std::to_string(shift));
        start();
        AdamArrays host;
        host.parameter_format = static_cast<ParameterFormat>(format);
        host.moment_type = types & 1 ? ElementType::bf16 : ElementType::fp32;
        host.gradient_type = types & 2 ? ElementType::bf16 : ElementType::fp32;
        const bool decoupled = (types & 4) != 0;
        const bool published = (types & 8) != 0;
        const std::size_t moment = types & 1 ? 2 : 4;
        const std::size_t gradient = types & 2 ? 2 : 4;
        const std::size_t parameter = format == 2 ? 4 : 2;
        const std::size_t master = format == 0 ? 2 : format == 1 ? 4 : 0;
        std::vector<float> values(kCount), m(kCount), v(kCount), g(kCount);
        for (std::size_t i = 0; i < kCount; ++i) {
          values[i] = any_value(1, i, true);
          m[i] = any_value(2, i, true) * 0.01f;
          v[i] = std::abs(any_value(3, i, true)) * 1e-4f;
          g[i] = any_value(4, i, true);
        }
        Array arrays[6] = {{std::vector<std::byte>(kCount * parameter)}, {std::vector<std::byte>(kCount * master)},
                           {std::vector<std::byte>(kCount * moment)},    {std::vector<std::byte>(kCount * moment)},
                           {std::vector<std::byte>(kCount * gradient)},  {std::vector<std::byte>(kCount * parameter)}};
        const auto put = [](const std::vector<float>& from, Array& to, std::size_t bytes) {
          if (bytes == 4) {
            std::memcpy(to.host.data(), from.data(), from.size() * 4);
          } else {
            fp32_to_bf16(from.data(), reinterpret_cast<std::uint16_t*>(to.host.data()), from.size());
          }
        };
        if (format == 0) {
          split_fp32(values.data(), reinterpret_cast<std::uint16_t*>(arrays[0].host.data()),
                     reinterpret_cast<std::uint16_t*>(arrays[1].host.data()), kCount);
        } else if (format == 1) {
          fp32_to_fp16(values.data(), reinterpret_cast<std::uint16_t*>(arrays[0].host.data()), kCount);
          put(values, arrays[1], 4);
        } else {
          put(values, arrays[0], 4);
        }
        put(m, arrays[2], moment);
        put(v, arrays[3], moment);
        put(g, arrays[4], gradient);
        for (Array& array : arrays) array.device = place(array.host.size(), shift, array.host.data());
        stream_->synchronize();
        AdamArrays device = host;
        const auto point = [&](AdamArrays& to, bool on_device) {
          const auto at = [&](int k) -> void* {
            return arrays[k].host.empty() ? nullptr : on_device ? arrays[k].device : arrays[k].host.data();
          };
          to.parameter = at(0);
          to.master = at(1);
          to.exp_avg = at(2);
          to.exp_avg_sq = at(3);
          to.gradient = at(4);
          to.published = published ? at(5) : nullptr;
        };
        point(host, false);
        point(device, true);
        // Segments of many sizes with gaps, more than one launch takes; what lies between stays as it is.
        std::vector<cuda::AdamSegment> segments;
        for (std::uint64_t begin = 5; begin < kCount;) {
          const std::uint64_t count = std::min<std::uint64_t>(kCount - begin, base::random_at(9, begin) % 60);
          const AdamHyperparameters h{1e-3, 0.9, 0.95, 1e-8, begin % 3 == 0 ? 0.0 : 0.1, decoupled};
          segments.push_back({begin, count, adam_scalars(h, 1 + begin % 5, 0.25)});
          begin += std::max<std::uint64_t>(1, count + base::random_at(10, begin) % 9);
        }
        ASSERT_GT(segments.size(), 60u);
        for (const auto& s : segments) {
          AdamArrays part = host;
          const auto move = [&](auto*& pointer, std::size_t bytes) {
            if (pointer != nullptr) pointer = static_cast<char*>(const_cast<void*>(pointer)) + s.begin * bytes;
          };
          void* moving_gradient = const_cast<void*>(host.gradient);
          move(part.parameter, parameter);
          move(part.master, master);
          move(part.exp_avg, moment);
          move(part.exp_avg_sq, moment);
          move(moving_gradient, gradient);
          part.gradient = moving_gradient;
          move(part.published, parameter);
          adam(s.scalars, part, s.count);
        }
        ASSERT_EQ(cuda::adam(device, segments.data(), segments.size(), on()), 0);
        for (int k = 0; k < 6; ++k) {
          if (arrays[k].host.empty()) continue;
          EXPECT_TRUE(same(fetch<std::byte>(arrays[k].device, arrays[k].host.size()), arrays[k].host,
                           arrays[k].host.size() == kCount * 4))
              << "array " << k;
        }
      }
    }
  }
}

TEST_F(DeviceKernelsTest, AccumulationAndSumsOfSquaresGiveTheBitsOfTheCpu) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{31}, kSumBlock, 2 * kSumBlock + 777}) {
    for (const std::size_t shift : {std::size_t{0}, std::size_t{4}}) {
      start();
      std::vector<float> a(count), b(count);
      for (std::size_t i = 0; i < count; ++i) {
        a[i] = any_value(5, i, true);
        b[i] = any_value(6, i, true);
      }
      std::vector<std::uint16_t> a16(count), b16(count);
      fp32_to_bf16(a.data(), a16.data(), count);
      fp32_to_bf16(b.data(), b16.data(), count);
      std::byte* const da = place(count * 4, shift, a.data());
      std::byte* const db = place(count * 4, shift, b.data());
      std::byte* const da16 = place(count * 2, shift, a16.data());
      std::byte* const db16 = place(count * 2, shift, b16.data());
      const std::size_t blocks = (count + kSumBlock - 1) / kSumBlock;
      std::byte* const sums = place(blocks * 8, 0);
      std::byte* const sums16 = place(blocks * 8, 0);
      ASSERT_EQ(cuda::accumulate(ElementType::fp32, da, db, 0.5f, count, on()), 0);
      ASSERT_EQ(cuda::accumulate(ElementType::bf16, da16, db16, 0.5f, count, on()), 0);
      ASSERT_EQ(cuda::sum_of_squares(ElementType::fp32, da, count, reinterpret_cast<double*>(sums), on()), 0);
      ASSERT_EQ(cuda::sum_of_squares(ElementType::bf16, da16, count, reinterpret_cast<double*>(sums16), on()), 0);
      accumulate_fp32(a.data(), b.data(), 0.5f, count);
      accumulate_bf16(a16.data(), b16.data(), 0.5f, count);
      std::vector<double> expected(blocks), expected16(blocks);
      sum_of_squares_fp32(a.data(), count, expected.data());
      sum_of_squares_bf16(a16.data(), count, expected16.data());
      EXPECT_EQ(std::memcmp(fetch<float>(da, count).data(), a.data(), count * 4), 0);
      EXPECT_EQ(fetch<std::uint16_t>(da16, count), a16);
      EXPECT_EQ(fetch<double>(sums, blocks), expected);
      EXPECT_EQ(fetch<double>(sums16, blocks), expected16);
    }
  }
}

TEST_F(DeviceKernelsTest, CastsGiveTheBitsOfTheCpu) {
  constexpr std::size_t kCount = 65536;
  start();
  std::vector<float> wide(kCount);
  std::vector<std::uint16_t> half(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto bits = static_cast<std::uint32_t>(base::random_at(7, i));  // NaN and infinities among them
    std::memcpy(&wide[i], &bits, 4);
    half[i] = static_cast<std::uint16_t>(i);
  }
  std::byte* const dwide = place(kCount * 4, 0, wide.data());
  std::byte* const dhalf = place(kCount * 2, 0, half.data());
  std::byte* const out = place(kCount * 4, 0);
  std::byte* const low = place(kCount * 2, 0);
  const auto* const source = reinterpret_cast<const float*>(dwide);
  const auto* const source16 = reinterpret_cast<const std::uint16_t*>(dhalf);
  std::vector<std::uint16_t> narrow(kCount), rest(kCount);
  std::vector<float> widened(kCount);

  ASSERT_EQ(cuda::fp32_to_bf16(source, reinterpret_cast<std::uint16_t*>(out), kCount, on()), 0);
  fp32_to_bf16(wide.data(), narrow.data(), kCount);
  EXPECT_EQ(fetch<std::uint16_t>(out, kCount), narrow);
  ASSERT_EQ(cuda::fp32_to_fp16(source, reinterpret_cast<std::uint16_t*>(out), kCount, on()), 0);
  fp32_to_fp16(wide.data(), narrow.data(), kCount);
  EXPECT_EQ(fetch<std::uint16_t>(out, kCount), narrow);
  ASSERT_EQ(cuda::bf16_to_fp32(source16, reinterpret_cast<float*>(out), kCount, on()), 0);
  bf16_to_fp32(half.data(), widened.data(), kCount);
  EXPECT_EQ(std::memcmp(fetch<float>(out, kCount).data(), widened.data(), kCount * 4), 0);
  ASSERT_EQ(cuda::fp16_to_fp32(source16, reinterpret_cast<float*>(out), kCount, on()), 0);
  fp16_to_fp32(half.data(), widened.data(), kCount);
  EXPECT_EQ(std::memcmp(fetch<float>(out, kCount).data(), widened.data(), kCount * 4), 0);
  ASSERT_EQ(cuda::split_fp32(source, reinterpret_cast<std::uint16_t*>(out), reinterpret_cast<std::uint16_t*>(low),
                             kCount, on()),
            0);
  split_fp32(wide.data(), narrow.data(), rest.data(), kCount);
  EXPECT_EQ(fetch<std::uint16_t>(out, kCount), narrow);
  EXPECT_EQ(fetch<std::uint16_t>(low, kCount), rest);
  std::byte* const merged = place(kCount * 4, 0);
  ASSERT_EQ(cuda::merge_fp32(reinterpret_cast<const std::uint16_t*>(out), reinterpret_cast<const std::uint16_t*>(low),
                             reinterpret_cast<float*>(merged), kCount, on()),
            0);
  merge_fp32(narrow.data(), rest.data(), widened.data(), kCount);
  EXPECT_EQ(std::memcmp(fetch<float>(merged, kCount).data(), widened.data(), kCount * 4), 0);
}

TEST_F(DeviceKernelsTest, TheFiniteCheckFindsOneElementAndFillWritesEvery) {
  constexpr std::size_t kCount = 10001;
  start();
  std::byte* const array = place(kCount * 4, 0);
  std::byte* const flag = place(4, 0);
  for (const ElementType type : {ElementType::fp32, ElementType::bf16}) {
    const std::size_t bytes = type == ElementType::fp32 ? 4 : 2;
    ASSERT_EQ(cuda::fill(type, array, -1.5f, kCount, on()), 0);
    stream_->fill_zero(flag, 4);
    ASSERT_EQ(cuda::find_non_finite(type, array, kCount, reinterpret_cast<std::uint32_t*>(flag), on()), 0);
    EXPECT_EQ(fetch<std::uint32_t>(flag, 1)[0], 0u);
    if (type == ElementType::fp32) {
      EXPECT_EQ(fetch<float>(array, kCount), std::vector<float>(kCount, -1.5f));
    }
    for (const std::size_t at : {std::size_t{0}, std::size_t{4095}, kCount - 1}) {
      ASSERT_EQ(cuda::fill(type, array, 1.0f, kCount, on()), 0);
      ASSERT_EQ(cuda::fill(type, array + at * bytes, NAN, 1, on()), 0);
      stream_->fill_zero(flag, 4);
      ASSERT_EQ(cuda::find_non_finite(type, array, kCount, reinterpret_cast<std::uint32_t*>(flag), on()), 0);
      EXPECT_EQ(fetch<std::uint32_t>(flag, 1)[0], 1u) << at;
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
