// Whether this build explains failures: records its calls, compares those of the ranks, and watches whether ranks live.
//
// Every build does, but one: benchmarks/diagnostics.py builds the engine without all that, to measure what it costs.
#pragma once

namespace procgroup {

#ifdef PROCGROUP_WITHOUT_DIAGNOSTICS
inline constexpr bool kDiagnoses = false;
#else
inline constexpr bool kDiagnoses = true;
#endif

}  // namespace procgroup
