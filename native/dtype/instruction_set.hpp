// Which instruction set the element kernels use: "baseline", "avx2" or "avx512".
//
// The best one that this processor has is chosen when the process starts. All give the same bits.
#pragma once

#include <string>
#include <vector>

namespace procgroup {

const char* instruction_set();

// Those that this processor has, the best last.
std::vector<std::string> instruction_sets();

// Use this one from now on, in the whole process. Throws std::invalid_argument when the processor lacks it.
void set_instruction_set(const std::string& name);

}  // namespace procgroup
