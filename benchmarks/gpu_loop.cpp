// The floor of gpu.py: calls of NCCL in a loop, with nothing between them. The driver compiles this file, and each rank
// loads it by ctypes. It needs no header of NCCL: the addresses of the functions come from the library that all peers
// of the process use.
#include <cstddef>

namespace {

enum Operation : int { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kMessage };

template <class... Arguments>
int repeat_call(int times, void* function, Arguments... arguments) {
  const auto call = reinterpret_cast<int (*)(Arguments...)>(function);
  int status = 0;
  for (int i = 0; i < times && status == 0; ++i) status = call(arguments...);
  return status;
}

}  // namespace

// Makes the calls of an operation, by its function of NCCL; `last` is the ncclRedOp_t, the root or the peer. Returns
// the first error of NCCL, or 0.
extern "C" int repeat(int times, int operation, void* function, const void* send, void* receive, size_t count, int type,
                      int last, void* communicator, void* stream) {
  switch (operation) {
    case kAllGather:
      return repeat_call(times, function, send, receive, count, type, communicator, stream);
    case kMessage:
      return repeat_call(times, function, receive, count, type, last, communicator, stream);
    default:
      return repeat_call(times, function, send, receive, count, type, last, communicator, stream);
  }
}
