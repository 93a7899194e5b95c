// The io_uring back end's door; only open_storage and tests use it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/io/storage.h>

#include <memory>
#include <string>

#include "result_hook.h"

namespace ballast::io {

// io_uring cannot be used here at all. The text says which call was refused, with the errno's name.
class UringUnavailable : public IoError {
 public:
  UringUnavailable(const std::string& call, int error);
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

// Throws ConfigError (options), UringUnavailable (the kernel or a filter refuses; proven by a real request).
std::unique_ptr<Storage> make_uring_storage(const StorageOptions& options, ResultHook hook = {});

}  // namespace ballast::io
