// ballast: trains, measures and examines. Exit status 0 done, 2 wrong usage, configuration or a plan that cannot fit,
// 1 anything else; an error is one line on standard error.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/io/directories.h>
#include <malloc.h>

#include <climits>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>

#include "command.h"
#include "gpu.h"
#include "interrupt.h"

namespace ballast::cli {
namespace {

int fail(int status, std::string_view text) {
  std::string line = "ballast: ";
  for (const char c : text) {
    const bool printable = static_cast<unsigned char>(c) >= 32 && c != 127;
    if (printable || (c == '\n' && line.back() != ' ')) line += printable ? c : ' ';
  }
  while (line.back() == ' ') line.pop_back();
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", line.c_str());
  return status;
}

int run(int argc, char** argv) {
  CLI::App app("Trains models whose states are larger than memory, and measures what that takes.", "ballast");
  app.require_subcommand(1);
  app.set_version_flag("--version", BALLAST_VERSION);
  std::vector<Command> commands;
  commands.push_back(add_train(app));
  commands.push_back(add_plan(app));
  CLI::App* bench = app.add_subcommand("bench", "Measure one link, or whole steps");
  bench->require_subcommand(1);
  commands.push_back(add_bench_io(*bench));
  commands.push_back(add_bench_adam(*bench));
  commands.push_back(add_bench_step(*bench));
  commands.push_back(add_bench_copy(*bench));
  commands.push_back(add_bench_collective(*bench));
  commands.push_back(add_tune(app));
  commands.push_back(add_doctor(app));
  for (Command& command : add_checkpoint(app)) commands.push_back(std::move(command));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const std::vector<std::string> unknown = app.remaining(true);
    const std::string what = unknown.empty() ? error.what() : "unknown argument \"" + unknown.front() + "\"";
    return fail(2, what + " (see ballast --help)");
  }
  const InterruptGuard guard;
  for (const Command& command : commands)
    if (command.parser->parsed()) return command.run();
  return fail(2, "no such subcommand");
}

int run_and_report(int argc, char** argv) {
  try {
    const int status = run(argc, argv);
    // A full disk behind a redirected standard output shows here at the latest.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) return fail(1, "cannot write to standard output");
    return status;
  } catch (const Interrupted& interrupted) {
    return fail(128 + interrupted.signal(), interrupted.what());
  } catch (const ConfigError& error) {
    return fail(2, error.what());
  } catch (const PlanError& error) {
    return fail(2, error.what());
  } catch (const io::UnusablePath& error) {
    return fail(2, error.what());
  } catch (const std::bad_alloc&) {
    return fail(1, "out of memory");
  } catch (const std::exception& error) {
    return fail(1, error.what());
  }
}

}  // namespace
}  // namespace ballast::cli

int main(int argc, char** argv) {
  ballast::cli::register_gpus();
  // Memory that a step gives back is wanted again by the next: page faults would cost more than they save.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  // A reader of our output that goes away is an error of that write, not the end of the process.
  std::signal(SIGPIPE, SIG_IGN);
  // So is a file that would grow beyond a limit on its size.
  std::signal(SIGXFSZ, SIG_IGN);
  return ballast::cli::run_and_report(argc, argv);
}
