// The address of a function of another library, which is called without the library's header.
#pragma once

namespace procgroup {

// Converts to a pointer to a function of the type that the caller declares.
struct FunctionAddress {
  void* value = nullptr;

  template <class Function>
  operator Function*() const {
    return reinterpret_cast<Function*>(value);
  }
};

}  // namespace procgroup
