// Agreement: that all ranks were given the same.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/communicator.h>

#include <span>
#include <string>
#include <vector>

namespace ballast {

struct NamedValue {
  std::string name;  // "version", "configuration", "model", "order of units"
  std::string text;
};

// Collective, blocking: every rank passes its list, of any length. Where lists differ, every rank throws the same
// CommunicationError, which tells which ranks differ from most of the others, and for each in what: the first value,
// its name, and where the two texts part, shortened. Costs one all-gather of 16 bytes where all agree.
void check_agreement(Communicator& communicator, std::span<const NamedValue> values);

// Collective, blocking: one text of any length from every rank, in their order.
std::vector<std::string> gather_texts(Communicator& communicator, const std::string& text);

}  // namespace ballast
