// Tells every engine of a process when it finds itself in a forked child.
//
// The child has the parent's memory and descriptors, but none of its threads. It must not keep sockets
// open (the parent's peers would not see the parent die) and must not touch what is shared.
#pragma once

namespace procgroup {

class Engine;

void guard_forks(Engine* engine);
void unguard_forks(Engine* engine);

}  // namespace procgroup
