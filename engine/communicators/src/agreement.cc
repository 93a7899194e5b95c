// Agreement at start: a fingerprint from each rank; where they differ, the list of one that most agree with goes to
// all, and each tells how its own differs. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/communicators/agreement.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace ballast {
namespace {

constexpr std::size_t kReportBytes = 400;  // what one rank tells of its difference
constexpr std::size_t kExcerptBytes = 60;  // of a text, from a little before the place where it differs
constexpr std::size_t kBeforeBytes = 20;
constexpr std::size_t kReportsShown = 4;

using Fingerprint = std::array<std::uint64_t, 2>;

void feed(Fingerprint& fingerprint, std::uint64_t value) {
  fingerprint[0] = base::mix(fingerprint[0] ^ value);
  fingerprint[1] = base::mix(fingerprint[1] + (value ^ 0xA5A5A5A5A5A5A5A5u));
}

void feed(Fingerprint& fingerprint, const std::string& text) {
  feed(fingerprint, text.size());
  for (std::size_t i = 0; i < text.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min<std::size_t>(8, text.size() - i));
    feed(fingerprint, word);
  }
}

Fingerprint fingerprint_of(std::span<const NamedValue> values) {
  Fingerprint fingerprint = {1, 2};
  feed(fingerprint, values.size());
  for (const NamedValue& value : values) {
    feed(fingerprint, value.name);
    feed(fingerprint, value.text);
  }
  return fingerprint;
}

void append(std::string& blob, const std::string& text) {
  const std::uint64_t bytes = text.size();
  blob.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  blob += text;
}

std::string packed(std::span<const NamedValue> values) {
  std::string blob;
  for (const NamedValue& value : values) {
    append(blob, value.name);
    append(blob, value.text);
  }
  return blob;
}

std::vector<NamedValue> unpacked(const std::string& blob) {
  std::vector<NamedValue> values;
  std::size_t at = 0;
  const auto next = [&] {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, blob.data() + at, sizeof bytes);
    at += sizeof bytes;
    std::string text = blob.substr(at, bytes);
    at += bytes;
    return text;
  };
  while (at < blob.size()) {
    std::string name = next();
    values.push_back({std::move(name), next()});
  }
  return values;
}

// A few characters around where the texts part, on one line.
std::string excerpt(const std::string& text, std::size_t difference) {
  const std::size_t begin = difference > kBeforeBytes ? difference - kBeforeBytes : 0;
  std::string out = text.substr(std::min(begin, text.size()), kExcerptBytes);
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return c < 0x20; }, ' ');
  return (begin > 0 ? "\"..." : "\"") + out + (begin + kExcerptBytes < text.size() ? "...\"" : "\"");
}

std::string short_name(const std::string& name) { return name.size() <= 60 ? name : name.substr(0, 57) + "..."; }

std::string difference(std::span<const NamedValue> mine, std::span<const NamedValue> reference) {
  const std::size_t both = std::min(mine.size(), reference.size());
  for (std::size_t i = 0; i < both; ++i) {
    if (mine[i].name != reference[i].name) {
      return "value " + std::to_string(i) + " is \"" + short_name(mine[i].name) + "\" there and \"" +
             short_name(reference[i].name) + "\" here";
    }
    const std::string& a = mine[i].text;
    const std::string& b = reference[i].text;
    if (a == b) continue;
    const auto at = static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
    return short_name(mine[i].name) + ": " + excerpt(a, at) + " there, " + excerpt(b, at) + " here" +
           (at == 0 ? "" : " (from character " + std::to_string(at) + " on)");
  }
  return "it has " + std::to_string(mine.size()) + " values, and here are " + std::to_string(reference.size());
}

}  // namespace

void check_agreement(Communicator& communicator, std::span<const NamedValue> values) {
  const auto ranks = static_cast<std::size_t>(communicator.world_size());
  const auto own = static_cast<std::size_t>(communicator.rank());
  const Fingerprint mine = fingerprint_of(values);
  std::vector<Fingerprint> all(ranks);
  communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  if (std::all_of(all.begin(), all.end(), [&](const Fingerprint& each) { return each == all.front(); })) return;

  std::size_t reference = 0;
  std::ptrdiff_t most = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto alike = std::count(all.begin(), all.end(), all[r]);
    if (alike > most) {
      most = alike;
      reference = r;
    }
  }
  std::string blob = own == reference ? packed(values) : std::string();
  std::uint64_t bytes = blob.size();
  communicator.broadcast(std::as_writable_bytes(std::span(&bytes, 1)), static_cast<int>(reference));
  blob.resize(bytes);
  communicator.broadcast(std::as_writable_bytes(std::span(blob.data(), blob.size())), static_cast<int>(reference));

  std::vector<char> report(kReportBytes, '\0');
  if (all[own] != all[reference]) {
    const std::string text = difference(values, unpacked(blob));
    std::copy_n(text.begin(), std::min(text.size(), kReportBytes - 1), report.begin());
  }
  std::vector<char> reports(kReportBytes * ranks);
  communicator.all_gather(std::as_bytes(std::span(report)), std::as_writable_bytes(std::span(reports)));
  std::string text = "ranks were not given the same; \"here\" is rank " + std::to_string(reference) +
                     (most > 1 ? " and " + std::to_string(most - 1) + " that agree with it" : "") + ":";
  std::size_t shown = 0;
  std::size_t differing = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    if (all[r] == all[reference]) continue;
    ++differing;
    if (shown == kReportsShown) continue;
    ++shown;
    text += (shown == 1 ? " rank " : "; rank ") + std::to_string(r) + " differs in " + &reports[r * kReportBytes];
  }
  if (differing > shown) text += "; and " + std::to_string(differing - shown) + " more ranks differ";
  throw CommunicationError(text + ". Start every rank with the same program, files and options");
}

std::vector<std::string> gather_texts(Communicator& communicator, const std::string& text) {
  const auto ranks = static_cast<std::size_t>(communicator.world_size());
  const std::uint64_t bytes = text.size();
  std::vector<std::uint64_t> all_bytes(ranks);
  communicator.all_gather(std::as_bytes(std::span(&bytes, 1)), std::as_writable_bytes(std::span(all_bytes)));
  const std::size_t most = *std::max_element(all_bytes.begin(), all_bytes.end());
  std::vector<std::string> texts(ranks);
  if (most == 0) return texts;
  std::string mine = text, all(most * ranks, '\0');
  mine.resize(most);
  communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t rank = 0; rank < ranks; ++rank) texts[rank] = all.substr(rank * most, all_bytes[rank]);
  return texts;
}

}  // namespace ballast
