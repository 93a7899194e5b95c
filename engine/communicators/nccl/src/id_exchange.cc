// The exchange of an id over TCP.
// SPDX-License-Identifier: Apache-2.0
#include "id_exchange.h"

#include <ballast/base/error.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace ballast::communicators {
namespace {

using Clock = std::chrono::steady_clock;

class Socket {
 public:
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
  ~Socket() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  int get() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

// What each side says first.
struct Greeting {
  std::uint64_t magic = 0x42616C6C61737431u;
  std::uint32_t world_size = 0;
  std::uint32_t port = 0;
  std::uint32_t rank = 0;
  std::uint32_t bytes = 0;
};

int left_ms(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return left > 0 ? static_cast<int>(std::min<std::int64_t>(left, 1 << 30)) : 0;
}

// All bytes or false: the other side went away or the time is over.
bool move_bytes(int socket, void* data, std::size_t bytes, bool sends, Clock::time_point deadline) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    pollfd waiting{socket, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
    const int ready = poll(&waiting, 1, left_ms(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    const ssize_t moved =
        sends ? send(socket, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(socket, at, bytes, MSG_DONTWAIT);
    if (moved < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (moved <= 0) return false;
    at += moved;
    bytes -= static_cast<std::size_t>(moved);
  }
  return true;
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
Addresses look_up(const char* host, int port, int flags, std::string& reason, bool* unknown = nullptr) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int result = getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
  if (result != 0) reason = gai_strerror(result);
  if (unknown != nullptr) *unknown = result == EAI_NONAME;
  return {found, &freeaddrinfo};
}

Socket listen_on(int port, std::string& reason) {
  const Addresses addresses = look_up(nullptr, port, AI_PASSIVE, reason);
  // IPv6 first, which takes IPv4 too; where there is none, IPv4.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      if (a->ai_family != family) continue;
      Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (!socket.open()) continue;
      const int on = 1;
      const int off = 0;
      // A port that a run before this one has just left is free.
      bool good = setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0;
      if (family == AF_INET6)
        good &= setsockopt(socket.get(), IPPROTO_IPV6, 26 /* IPV6_V6ONLY */, &off, sizeof off) == 0;
      if (good && bind(socket.get(), a->ai_addr, a->ai_addrlen) == 0 && listen(socket.get(), 1024) == 0) return socket;
      reason = std::strerror(errno);
    }
  }
  return Socket();
}

void serve(std::span<std::byte> data, int world_size, int port, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  std::string reason;
  const Socket listener = listen_on(port, reason);
  if (!listener.open()) {
    throw CommunicationError("rank 0 cannot listen on port " + std::to_string(port) + " (MASTER_PORT + 1): " + reason +
                             "; another job may use it: set another MASTER_PORT");
  }
  std::vector<bool> served(static_cast<std::size_t>(world_size), false);
  int missing = world_size - 1;
  while (missing > 0) {
    pollfd waiting{listener.get(), POLLIN, 0};
    const int ready = poll(&waiting, 1, left_ms(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) break;
    const Socket peer(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer.open()) continue;
    // A stranger that says nothing must not hold up the others for long.
    const Clock::time_point patience = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    Greeting theirs;
    if (!move_bytes(peer.get(), &theirs, sizeof theirs, false, patience)) continue;
    const Greeting own{.world_size = static_cast<std::uint32_t>(world_size),
                       .port = static_cast<std::uint32_t>(port),
                       .rank = 0,
                       .bytes = static_cast<std::uint32_t>(data.size())};
    const bool ours = theirs.magic == own.magic && theirs.world_size == own.world_size && theirs.port == own.port &&
                      theirs.bytes == own.bytes && theirs.rank > 0 && theirs.rank < own.world_size &&
                      !served[theirs.rank];
    Greeting answer = own;
    if (!ours) answer.world_size = 0;
    if (!move_bytes(peer.get(), &answer, sizeof answer, true, patience) || !ours) continue;
    if (!move_bytes(peer.get(), data.data(), data.size(), true, patience)) continue;
    served[theirs.rank] = true;
    --missing;
  }
  if (missing == 0) return;
  std::string names;
  int named = 0;
  for (std::size_t r = 1; r < served.size() && named < 8; ++r) {
    if (served[r]) continue;
    names += (named++ > 0 ? ", " : "") + std::to_string(r);
  }
  if (missing > named) names += ", and " + std::to_string(missing - named) + " more";
  throw CommunicationError("rank 0 gave the id of NCCL to " + std::to_string(world_size - 1 - missing) + " of " +
                           std::to_string(world_size - 1) + " ranks on port " + std::to_string(port) + " within " +
                           std::to_string(timeout.count()) + " ms; not to rank " + names +
                           ": see what became of them, and whether they reach this port");
}

void fetch(std::span<std::byte> data, int rank, int world_size, const std::string& address, int port,
           std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  // A name that nobody knows may come to be known when its machine starts, but not much later.
  const Clock::time_point known_by = Clock::now() + timeout / 3;
  std::string reason = "nobody answered";
  bool unknown = false;
  do {
    const Addresses addresses = look_up(address.c_str(), port, 0, reason, &unknown);
    if (unknown && Clock::now() > known_by) break;
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      const Socket socket(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (!socket.open()) continue;
      if (connect(socket.get(), a->ai_addr, a->ai_addrlen) != 0) {
        pollfd waiting{socket.get(), POLLOUT, 0};
        int error = errno;
        socklen_t length = sizeof error;
        if (error == EINPROGRESS && poll(&waiting, 1, std::min(left_ms(deadline), 2000)) == 1) {
          if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
        }
        if (error != 0) {
          reason = std::strerror(error);
          continue;
        }
      }
      Greeting own{.world_size = static_cast<std::uint32_t>(world_size),
                   .port = static_cast<std::uint32_t>(port),
                   .rank = static_cast<std::uint32_t>(rank),
                   .bytes = static_cast<std::uint32_t>(data.size())};
      Greeting theirs;
      if (!move_bytes(socket.get(), &own, sizeof own, true, deadline) ||
          !move_bytes(socket.get(), &theirs, sizeof theirs, false, deadline)) {
        reason = "the connection ended before the id came";
        continue;
      }
      if (theirs.magic != own.magic || theirs.world_size != own.world_size) {
        reason = "what answers there is no rank 0 of " + std::to_string(world_size) + " ranks";
        continue;
      }
      if (move_bytes(socket.get(), data.data(), data.size(), false, deadline)) return;
      reason = "the connection ended before the id came";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(100, left_ms(deadline))));
  } while (left_ms(deadline) > 0);
  throw CommunicationError("rank " + std::to_string(rank) + " got no NCCL id from " + address + ":" +
                           std::to_string(port) + " (MASTER_ADDR, MASTER_PORT + 1)" +
                           (unknown ? "" : " within " + std::to_string(timeout.count()) + " ms") + ": " + reason);
}

}  // namespace

void exchange_from_rank_zero(std::span<std::byte> data, int rank, int world_size, const std::string& address, int port,
                             std::chrono::milliseconds timeout) {
  if (port <= 0 || port > 65535) {
    throw CommunicationError("the NCCL id is exchanged on port " + std::to_string(port) +
                             " (MASTER_PORT + 1), and ports end at 65535: set another MASTER_PORT");
  }
  if (world_size == 1) return;
  if (rank == 0) {
    serve(data, world_size, port, timeout);
  } else {
    fetch(data, rank, world_size, address, port, timeout);
  }
}

}  // namespace ballast::communicators
