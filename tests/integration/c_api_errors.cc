// What the C++ interface says about a configuration, for the test in C to compare with.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/engine/engine.h>

#include <string>

extern "C" const char* cpp_config_error(const char* json, const char* name) {
  static std::string text;
  text.clear();
  try {
    ballast::Config::from_json(json, name);
  } catch (const ballast::ConfigError& error) {
    text = error.what();
  }
  return text.c_str();
}
