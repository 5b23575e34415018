// The messages of the store's handshake and their verification, as pure functions (see protocol.hpp).
#pragma once

#include <string>

#include "store/protocol.hpp"

namespace procgroup::store {

struct Identity {
  std::string job;      // name of the job; empty: unknown
  std::string job_key;  // the job's secret; empty: none
};

Hello make_hello(const Identity& mine, uint64_t client, uint32_t flags);
Welcome make_welcome(const Identity& mine, const Hello& hello);
Welcome make_refusal(const Identity& mine, Admission reason);
Digest client_proof(const Identity& mine, const Hello& hello, const Welcome& welcome);
bool server_proof_holds(const Identity& mine, const Hello& hello, const Welcome& welcome);

inline uint64_t client_of(const Hello& hello) { return uint64_t{hello.client[1]} << 32 | hello.client[0]; }
std::string job_of(const char (&field)[64]);

}  // namespace procgroup::store
