#include "store/protocol.hpp"

#include <unistd.h>

#include <algorithm>

namespace procgroup::store {
namespace {

Digest prove(std::string_view role, const Identity& mine, const Hello& hello, const Welcome& welcome) {
  std::string message(role);
  message.append(reinterpret_cast<const char*>(&hello), sizeof hello);
  message.append(reinterpret_cast<const char*>(welcome.nonce), sizeof welcome.nonce);
  return hmac_sha256(mine.job_key, message);
}

void set_job(char (&field)[64], const std::string& job) { job.copy(field, sizeof field); }

Admission judge(const Identity& mine, const Hello& hello) {
  if (hello.version != kVersion) return Admission::kOtherVersion;
  const std::string theirs = job_of(hello.job);
  if (!theirs.empty() && !mine.job.empty() && theirs != mine.job.substr(0, sizeof hello.job)) {
    return Admission::kOtherJob;
  }
  if (!mine.job_key.empty() && !(hello.flags & kHasKey)) return Admission::kKeyNeeded;
  return Admission::kWelcome;
}

}  // namespace

std::string job_of(const char (&field)[64]) { return {field, std::find(field, field + sizeof field, '\0')}; }

Hello make_hello(const Identity& mine, uint64_t client, uint32_t flags) {
  Hello hello{};
  kMagic.copy(hello.magic, sizeof hello.magic);
  hello.version = kVersion;
  hello.flags = flags | (mine.job_key.empty() ? 0u : uint32_t{kHasKey});
  hello.client[0] = static_cast<uint32_t>(client);
  hello.client[1] = static_cast<uint32_t>(client >> 32);
  fill_random(hello.nonce, sizeof hello.nonce);
  set_job(hello.job, mine.job);
  hello.process = static_cast<uint32_t>(getpid());
  return hello;
}

Welcome make_refusal(const Identity& mine, Admission reason) {
  Welcome welcome{};
  kMagic.copy(welcome.magic, sizeof welcome.magic);
  welcome.version = kVersion;
  welcome.admission = static_cast<uint32_t>(reason);
  set_job(welcome.job, mine.job);
  return welcome;
}

Welcome make_welcome(const Identity& mine, const Hello& hello) {
  Welcome welcome = make_refusal(mine, judge(mine, hello));
  if (welcome.admission == static_cast<uint32_t>(Admission::kWelcome)) {
    fill_random(welcome.nonce, sizeof welcome.nonce);
    if (!mine.job_key.empty()) welcome.proof = prove("server", mine, hello, welcome);
  }
  return welcome;
}

Digest client_proof(const Identity& mine, const Hello& hello, const Welcome& welcome) {
  return prove("client", mine, hello, welcome);
}

bool server_proof_holds(const Identity& mine, const Hello& hello, const Welcome& welcome) {
  return same_digest(prove("server", mine, hello, welcome), welcome.proof);
}

}  // namespace procgroup::store
