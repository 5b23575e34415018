// Through which functions a small all_reduce goes, from CallQueue::run to the store of its first element.
//
// The array is on a page that may not be written. The first store into it faults; the handler takes the stack, lets
// the page be written, and the call goes on. Counted is each function of procgroup on that stack, also one that the
// compiler has inlined or that ends in a call of the next: addr2line finds them in the line tables. Templates and
// lambdas count; functions of the standard library and of this test do not. A kernel is one function, whatever the
// compiler makes of its loops: that differs from processor to processor. The other rank has announced its call before.
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/check.hpp"
#include "tests/engine_fixture.hpp"

using namespace procgroup;

namespace {

struct Frame {
  std::string function;  // without its class and its arguments
  std::string file;      // from native/ on
  bool operator==(const Frame&) const = default;
};

// docs/design/native.md shows them, too ("One call").
const std::vector<Frame> kFrames = {
    {"run", "group/call_queue.cpp"},
    {"poll", "group/call_queue.cpp"},
    {"advance", "collectives/collective_call.cpp"},
    {"finish_small", "collectives/small_call.cpp"},
    {"kernel", "dtype/kernels.cpp"},
};
constexpr size_t kMostFrames = 5;  // before them: two of Python, and four of the binding
constexpr size_t kMostFiles = 4;   // and three files

constexpr size_t kPage = 4096;
std::array<void*, 64> stack;
int depth = 0;
void* page = nullptr;

void take_stack(int, siginfo_t* fault, void*) {
  if (fault->si_addr != page || depth != 0) abort();
  depth = backtrace(stack.data(), static_cast<int>(stack.size()));
  mprotect(page, kPage, PROT_READ | PROT_WRITE);
}

// "procgroup::CallQueue::run(procgroup::Request&, double)": "run"
std::string short_name(const std::string& function) {
  const std::string name = function.substr(0, function.find('('));
  const size_t scope = name.rfind("::");
  return scope == std::string::npos ? name : name.substr(scope + 2);
}

// The functions and files that addr2line prints in turn, those of procgroup alone.
std::vector<Frame> read_frames(FILE* lines) {
  std::vector<Frame> frames;
  std::array<char, 8192> function{}, place{};
  while (std::fgets(function.data(), function.size(), lines) && std::fgets(place.data(), place.size(), lines)) {
    const std::string path(place.data(), std::find(place.data(), place.data() + place.size(), ':'));
    const size_t root = path.rfind("/native/");
    if (root == std::string::npos || path.compare(root, 14, "/native/tests/") == 0) continue;
    Frame frame{short_name({function.data(), std::find(function.data(), function.data() + function.size(), '\n')}),
                path.substr(root + std::string("/native/").size())};
    for (const char* file : {"dtype/kernels.cpp", "dtype/combine.hpp", "dtype/elements.hpp"})
      if (frame.file == file) frame = {"kernel", "dtype/kernels.cpp"};
    if (frame.function != "kernel" || frames.empty() || frames.back() != frame) frames.push_back(frame);
  }
  std::ranges::reverse(frames);
  return frames;
}

std::vector<Frame> resolve_stack() {
  Dl_info module;
  link_map* map = nullptr;
  CHECK(dladdr1(reinterpret_cast<void*>(&take_stack), &module, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) != 0);
  std::ostringstream command;
  command << PROCGROUP_ADDR2LINE << " -f -i -C -e /proc/" << getpid() << "/exe" << std::hex;
  for (int index = 0; index < depth; ++index)  // these are the addresses to return to: one less is in the call
    command << " 0x" << reinterpret_cast<uintptr_t>(stack[static_cast<size_t>(index)]) - map->l_addr - 1;
  FILE* lines = popen(command.str().c_str(), "r");
  CHECK(lines != nullptr);
  std::vector<Frame> frames = read_frames(lines);
  CHECK(pclose(lines) == 0);
  return frames;
}

Request all_reduce_of_one(int64_t* element) {
  Request request;
  request.descriptor.op = OpKind::kAllReduce;
  request.descriptor.dtype = Dtype::kInt64;
  request.descriptor.count = 1;
  request.input = request.output = element;
  return request;
}

void make_the_call(int64_t* element) {
  std::vector<Rank> world = make_world(2);
  NoRuntime language;
  int64_t other = 2;
  // Where ranks outnumber cores, start() advances the call before it returns.
  const auto announced = world[1].group->calls().start(all_reduce_of_one(&other), 60, &language);
  Request request = all_reduce_of_one(element);
  world[0].group->calls().run(request, 60, language);
  CHECK(*element == 3);
  while (!announced->is_completed()) sched_yield();
}

}  // namespace

int main() {
  testing::limit_seconds(60);
  page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(page != MAP_FAILED);
  auto* element = static_cast<int64_t*>(page);
  *element = 1;
  CHECK(mprotect(page, kPage, PROT_READ) == 0);
  backtrace(stack.data(), 1);  // loads what it needs, which a handler must not
  struct sigaction action{};
  action.sa_sigaction = take_stack;
  action.sa_flags = SA_SIGINFO;
  CHECK(sigaction(SIGSEGV, &action, nullptr) == 0);
  make_the_call(element);

  const std::vector<Frame> frames = resolve_stack();
  std::set<std::string> files;
  for (const Frame& frame : frames) {
    std::fprintf(stderr, "%-24s %s\n", frame.function.c_str(), frame.file.c_str());
    files.insert(frame.file);
  }
  std::fprintf(stderr, "%zu functions in %zu files\n", frames.size(), files.size());
  CHECK(frames == kFrames);
  CHECK(frames.size() <= kMostFrames && files.size() <= kMostFiles);
}
