// The functions by which XLA calls a handler of another library (XLA FFI), declared without XLA's headers.
//
// Structures and numbers are those of version 0.3 of xla/ffi/api/c_api.h, which jaxlib ships
// (https://github.com/openxla/xla/blob/main/xla/ffi/api/c_api.h). A structure begins with its size in bytes, and a
// newer version appends to it: so a handler has to check that what it reads is there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype/dtype.hpp"

namespace procgroup::xla {

inline constexpr int kMajorVersion = 0;
inline constexpr int kMinorVersion = 3;

struct Error;    // opaque; the caller of a handler destroys it
struct Context;  // opaque

enum class ErrorCode : int { kInternal = 13 };
enum class ExtensionType : int { kMetadata = 1 };
enum class Stage : int { kInstantiate, kPrepare, kInitialize, kExecute };
enum class AttributeType : int { kArray = 1, kDictionary, kScalar, kString };
// The number of an element type: that of a dtype, or of a token, which has no elements.
using DataType = int;
inline constexpr DataType kToken = 17;
constexpr DataType type_of(Dtype dtype) { return row_of(dtype).xla; }

// What XLA attaches to a structure: a list.
struct Extension {
  size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct Version {
  size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dimensions;
};

struct ByteSpan {
  const char* data;
  size_t size;
};

struct Scalar {
  DataType dtype;
  void* value;
};

// Arguments, or results. XLA has no other types than buffers yet: `types` are all 1.
struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  Buffer** buffers;
};
inline constexpr int kBufferType = 1;

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** values;
};

struct ErrorArguments {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

struct StreamArguments {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // out: on a GPU of NVIDIA a CUstream
};

// The functions of XLA up to the last one that handlers use; the others come after these.
struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArguments*);
  void* get_error_message = nullptr;
  void* destroy_error = nullptr;
  void* register_handler = nullptr;
  Error* (*get_stream)(StreamArguments*) = nullptr;
};

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  Stage stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

// A call with this extension asks for the handler's version, and moves nothing.
struct Metadata {
  size_t struct_size;
  Version version;  // out
  uint32_t traits;  // out
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

// Returns null for success.
using Handler = Error*(CallFrame*);

}  // namespace procgroup::xla
