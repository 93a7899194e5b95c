// The typed errors of Ballast. What the world may do (bad input, full disks, dead peers) is one of these; what only a
// bug may do is a BALLAST_CHECK (check.h). Texts name the file, offset, unit or rank, the numbers, and what to do.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace ballast {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A configuration, model or command line that means nothing.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// A plan that cannot fit its budgets; the text ends with the smallest budget that works.
class PlanError : public Error {
 public:
  using Error::Error;
};

// The operating system or a device refused or failed an operation.
class IoError : public Error {
 public:
  using Error::Error;
};

// Bytes came back that are not the bytes that were written.
class CorruptionError : public Error {
 public:
  using Error::Error;
};

// A rank is dead, stuck or disagrees.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

// The caller broke the contract of a call.
class UsageError : public Error {
 public:
  using Error::Error;
};

}  // namespace ballast
