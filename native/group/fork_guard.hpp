// Notifies every engine of a process in a forked child.
//
// The child has a copy of the parent's memory, but none of its threads and no mapping of what is shared. Its
// descriptors are closed already (base/file_descriptor.hpp).
#pragma once

namespace procgroup {

class Engine;

void guard_forks(Engine* engine);
void unguard_forks(Engine* engine);

}  // namespace procgroup
