// The headers of object operations, which groups/object_format.py describes. A header holds small objects as a
// whole: these go from Python's pickle to the other ranks, and back to pickle, without an array in between.
//
//     header     Fields, then `inlined` bytes: of a rank that failed its error, else the metadata if they fit, and
//                behind them the payload if that fits, too
//     whole      each object is one stream of pickle without buffers, and all of it is in the header:
//                metadata   count times 1, the number of buffers | count lengths of names | names | count sizes
//                payload    the streams, each at a multiple of 64 bytes
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "python_group.hpp"

using namespace nanobind::literals;

namespace procgroup {
namespace {

constexpr size_t kHeaderBytes = 1024;
constexpr size_t kAlignment = 64;
constexpr std::array<char, 4> kMagic{'p', 'g', 'o', '1'};

struct Fields {
  std::array<char, 4> magic = kMagic;
  uint16_t kind = 0;
  uint16_t failed = 0;
  int32_t root = -1;
  int32_t count = 0;
  int64_t metadata = 0;  // bytes
  int64_t payload = 0;
  int64_t inlined = 0;
};
constexpr size_t kInlineBytes = kHeaderBytes - sizeof(Fields);

size_t aligned(size_t offset) { return (offset + kAlignment - 1) & ~(kAlignment - 1); }

// A header of another rank, which may be anything.
class ReceivedHeader {
 public:
  explicit ReceivedHeader(nb::handle raw) {
    if (!PyBytes_Check(raw.ptr()) || PyBytes_Size(raw.ptr()) != kHeaderBytes) return;
    bytes_ = std::as_bytes(std::span(PyBytes_AsString(raw.ptr()), kHeaderBytes));
    std::memcpy(&fields_, bytes_.data(), sizeof fields_);
    const int64_t least = std::min({int64_t{fields_.count}, fields_.metadata, fields_.payload, fields_.inlined});
    is_valid_ = fields_.magic == kMagic && fields_.failed <= 1 && least >= 0 &&
                fields_.inlined <= static_cast<int64_t>(kInlineBytes);
    bytes_ = bytes_.subspan(sizeof fields_);
  }

  bool is_valid() const { return is_valid_; }
  const Fields& fields() const { return fields_; }
  std::span<const std::byte> inlined() const { return bytes_.first(static_cast<size_t>(fields_.inlined)); }

  // The streams, where the header is of this call and holds its objects as a whole; no stream, where it has no objects.
  std::optional<nb::list> streams(uint16_t kind, int32_t root, int32_t count) const {
    if (!is_valid_ || fields_.failed != 0 || fields_.kind != kind || fields_.root != root || fields_.count != count)
      return std::nullopt;
    nb::list found;
    if (fields_.metadata == 0 && fields_.payload == 0 && fields_.inlined == 0) return found;
    const auto objects = static_cast<size_t>(count);
    const std::span<const std::byte> all = inlined();
    if (objects > kInlineBytes / 24 || all.size() < 24 * objects) return std::nullopt;
    size_t names = 0;
    for (size_t index = 0; index < objects; ++index) {
      const uint64_t length = word(all, 8 * (objects + index));
      if (word(all, 8 * index) != 1 || length > kInlineBytes) return std::nullopt;
      names += length;
    }
    const size_t metadata = 24 * objects + names;
    if (static_cast<size_t>(fields_.metadata) != metadata || metadata > all.size()) return std::nullopt;
    size_t begin = 0;
    size_t end = 0;
    for (size_t index = 0; index < objects; ++index) {
      const uint64_t size = word(all, 16 * objects + names + 8 * index);
      begin = aligned(end);
      if (size > kInlineBytes) return std::nullopt;
      end = begin + size;
      if (metadata + end > all.size()) return std::nullopt;
      found.append(nb::bytes(all.data() + metadata + begin, size));
    }
    const bool is_all = static_cast<size_t>(fields_.payload) == end && metadata + end == all.size();
    return is_all ? std::optional(found) : std::nullopt;
  }

 private:
  static uint64_t word(std::span<const std::byte> from, size_t offset) {
    uint64_t value = 0;
    std::memcpy(&value, from.data() + offset, sizeof value);
    return value;
  }

  std::span<const std::byte> bytes_;
  Fields fields_;
  bool is_valid_ = false;
};

// A header under construction.
class NewHeader {
 public:
  NewHeader(uint16_t kind, int32_t root, int32_t count) {
    fields_.kind = kind;
    fields_.root = root;
    fields_.count = count;
  }

  Fields& fields() { return fields_; }
  bool fits(size_t bytes) const { return bytes <= kInlineBytes - used_; }
  void add(const void* data, size_t bytes) {
    std::memcpy(memory_.data() + sizeof fields_ + used_, data, bytes);
    used_ += bytes;
  }
  void add(uint64_t value) { add(&value, sizeof value); }
  void skip_to(size_t offset) { used_ = offset; }
  const std::array<std::byte, kHeaderBytes>& finished() {
    fields_.inlined = static_cast<int64_t>(used_);
    std::memcpy(memory_.data(), &fields_, sizeof fields_);
    return memory_;
  }

 private:
  std::array<std::byte, kHeaderBytes> memory_{};
  Fields fields_;
  size_t used_ = 0;
};

nb::bytes as_bytes(const std::array<std::byte, kHeaderBytes>& header) {
  return nb::bytes(header.data(), header.size());
}

nb::bytes pack_header(uint16_t kind, int32_t root, int32_t count, bool failed, int64_t metadata, int64_t payload,
                      const nb::bytes& inlined) {
  NewHeader header(kind, root, count);
  header.fields().failed = failed ? 1 : 0;
  header.fields().metadata = metadata;
  header.fields().payload = payload;
  if (!header.fits(inlined.size())) throw nb::value_error("the bytes do not fit into a header");
  header.add(inlined.data(), inlined.size());
  return as_bytes(header.finished());
}

nb::object unpack_header(nb::handle raw) {
  const ReceivedHeader header(raw);
  if (!header.is_valid()) return nb::none();
  const Fields& fields = header.fields();
  const std::span<const std::byte> inlined = header.inlined();
  return nb::make_tuple(fields.kind, fields.root, fields.count, fields.failed != 0, fields.metadata, fields.payload,
                        nb::bytes(inlined.data(), inlined.size()));
}

// An object as bytes: its type's name and its stream, which somebody else owns.
struct Stream {
  std::span<const char> name;
  std::span<const char> bytes;
};

// A header that holds these objects as a whole; nothing where they do not fit.
std::optional<NewHeader> pack_whole(uint16_t kind, int32_t root, const std::vector<Stream>& streams) {
  const size_t count = streams.size();
  if (count == 0 || count > kInlineBytes / 24) return std::nullopt;
  size_t metadata = 24 * count;
  size_t payload = 0;
  for (const Stream& stream : streams) {
    metadata += stream.name.size();
    payload = aligned(payload) + stream.bytes.size();
  }
  NewHeader header(kind, root, static_cast<int32_t>(count));
  if (!header.fits(metadata) || !header.fits(metadata + payload)) return std::nullopt;
  header.fields().metadata = static_cast<int64_t>(metadata);
  header.fields().payload = static_cast<int64_t>(payload);
  for (size_t index = 0; index < count; ++index) header.add(1);
  for (const Stream& stream : streams) header.add(stream.name.size());
  for (const Stream& stream : streams) header.add(stream.name.data(), stream.name.size());
  for (const Stream& stream : streams) header.add(stream.bytes.size());
  size_t end = 0;
  for (const Stream& stream : streams) {
    header.skip_to(metadata + aligned(end));
    header.add(stream.bytes.data(), stream.bytes.size());
    end = aligned(end) + stream.bytes.size();
  }
  return header;
}

std::span<const char> chars_of(nb::handle bytes) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw nb::python_error();
  return {data, static_cast<size_t>(size)};
}

nb::object pack_whole_objects(uint16_t kind, int32_t root, const nb::list& names, const nb::list& streams) {
  if (names.size() != streams.size()) throw nb::value_error("expected a name for each stream");
  std::vector<Stream> given;
  for (size_t index = 0; index < names.size(); ++index)
    given.push_back({chars_of(names[index]), chars_of(streams[index])});
  std::optional<NewHeader> header = pack_whole(kind, root, given);
  return header ? nb::object(as_bytes(header->finished())) : nb::none();
}

// Looks through an object, as far as one that fits into a header can reach.
class PlainObject {
 public:
  // The name of its type; null unless it is plain.
  static const char* name_of(PyObject* object) { return PlainObject().look(object, 0); }

 private:
  static constexpr int kDepth = 8;
  static constexpr int kParts = 100;

  const char* look(PyObject* object, int depth) {
    if (++parts_ > kParts || depth > kDepth) return nullptr;
    if (object == Py_None) return "NoneType";
    if (PyBool_Check(object)) return "bool";
    if (PyLong_CheckExact(object)) return "int";
    if (PyFloat_CheckExact(object)) return "float";
    if (PyUnicode_CheckExact(object)) return takes(PyUnicode_GetLength(object)) ? "str" : nullptr;
    if (PyBytes_CheckExact(object)) return takes(PyBytes_Size(object)) ? "bytes" : nullptr;
    if (PyTuple_CheckExact(object)) {
      for (Py_ssize_t index = 0, size = PyTuple_Size(object); index < size; ++index)
        if (look(PyTuple_GetItem(object, index), depth + 1) == nullptr) return nullptr;
      return "tuple";
    }
    if (PyList_CheckExact(object)) {
      for (Py_ssize_t index = 0; index < PyList_Size(object); ++index)
        if (look(PyList_GetItem(object, index), depth + 1) == nullptr) return nullptr;
      return "list";
    }
    if (PyDict_CheckExact(object)) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &value) != 0;)
        if (look(key, depth + 1) == nullptr || look(value, depth + 1) == nullptr) return nullptr;
      return "dict";
    }
    return nullptr;
  }

  bool takes(Py_ssize_t bytes) { return (bytes_ += bytes) <= static_cast<Py_ssize_t>(kInlineBytes); }

  int parts_ = 0;
  Py_ssize_t bytes_ = 0;
};

// Pickle objects and pack them; nothing unless all are plain and fit. The caller pickles the others, and those that
// cannot be pickled: it reports the error.
std::optional<NewHeader> pickle_whole(uint16_t kind, int32_t root, nb::handle objects) {
  static const nb::handle dumps = nb::object(nb::module_::import_("pickle").attr("dumps")).release();
  static const nb::handle protocol = nb::int_(5).release();
  std::vector<Stream> streams;
  std::vector<nb::object> owners;
  const Py_ssize_t count = PySequence_Size(objects.ptr());
  if (count > static_cast<Py_ssize_t>(kInlineBytes / 24)) return std::nullopt;
  for (Py_ssize_t index = 0; index < count; ++index) {
    const nb::object object = nb::steal(PySequence_GetItem(objects.ptr(), index));
    if (!object.is_valid()) throw nb::python_error();
    const char* name = PlainObject::name_of(object.ptr());
    if (name == nullptr) return std::nullopt;
    try {
      owners.push_back(dumps(object, protocol));
    } catch (nb::python_error&) {
      return std::nullopt;
    }
    streams.push_back({std::span(name, std::strlen(name)), chars_of(owners.back())});
  }
  return pack_whole(kind, root, streams);
}

nb::object whole_objects(const nb::list& headers, uint16_t kind, int32_t root, int32_t count) {
  nb::list found;
  for (const nb::handle raw : headers) {
    const std::optional<nb::list> streams = ReceivedHeader(raw).streams(kind, root, count);
    if (!streams) return nb::none();
    found.append(*streams);
  }
  return found;
}

// The header of a call whose objects Python gives: bytes that it has packed; or the objects, which are packed here if
// they are plain and fit; or their number, of a rank that sends none.
class GivenHeader {
 public:
  GivenHeader(uint16_t kind, int32_t root, nb::handle given) {
    if (PyBytes_Check(given.ptr())) {
      const std::span<const char> bytes = chars_of(given);
      if (bytes.size() != kHeaderBytes) throw nb::value_error("expected a packed header");
      data_ = bytes.data();
      return;
    }
    if (PyLong_Check(given.ptr()))
      made_.emplace(kind, root, nb::cast<int32_t>(given));
    else
      made_ = pickle_whole(kind, root, given);
    if (made_) data_ = made_->finished().data();
  }

  // Null for objects that are not plain, or do not fit.
  void* data() const { return const_cast<void*>(data_); }

 private:
  std::optional<NewHeader> made_;
  const void* data_ = nullptr;
};

// Bytes that are written before anybody else sees them.
nb::object unwritten_header() {
  nb::object made = nb::steal(PyBytes_FromStringAndSize(nullptr, kHeaderBytes));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

}  // namespace

namespace {

// Objects that Python's `loads` makes of streams. `failed` tells which one it could not, and its error.
struct Loaded {
  nb::list objects;
  nb::object failed = nb::none();

  // Those of one rank, or, of them, the one that is wanted; false after a failure.
  bool load(const nb::list& streams, int rank, nb::handle loads, int wanted) {
    nb::list made;
    for (size_t index = 0; index < streams.size(); ++index) {
      if (wanted >= 0 && index != static_cast<size_t>(wanted)) continue;
      try {
        made.append(loads(nb::handle(streams[index])));
      } catch (nb::python_error& error) {
        if (!error.matches(PyExc_Exception)) throw;
        failed = nb::make_tuple(rank, index, nb::borrow(error.value()));
        return false;
      }
    }
    objects.append(made);
    return true;
  }
};

}  // namespace

nb::object PythonGroup::exchange_objects(nb::handle given, int kind, int root, int count, nb::handle loads, int wanted,
                                         double seconds) {
  const GivenHeader header(static_cast<uint16_t>(kind), root, given);
  if (header.data() == nullptr) return nb::none();
  Request request;
  request.descriptor.op = OpKind::kAllGather;
  request.descriptor.dtype = Dtype::kUint8;
  request.descriptor.count = kHeaderBytes;
  request.source = engine_->source_line();
  request.input = header.data();
  request.outputs.reserve(static_cast<size_t>(group_->size()));
  nb::list received;
  for (int rank = 0; rank < group_->size(); ++rank) {
    const nb::object made = unwritten_header();
    request.outputs.push_back({PyBytes_AsString(made.ptr()), kHeaderBytes});
    received.append(made);
  }
  run(request, seconds);
  const nb::object whole = whole_objects(received, static_cast<uint16_t>(kind), root, count);
  if (whole.is_none()) return nb::make_tuple(received, nb::none(), nb::none());
  Loaded loaded;
  int rank = 0;
  if (!loads.is_none())
    for (const nb::handle streams : nb::cast<nb::list>(whole))
      if (!loaded.load(nb::borrow<nb::list>(streams), rank++, loads, wanted)) break;
  return nb::make_tuple(received, loaded.objects, loaded.failed);
}

nb::object PythonGroup::send_objects(nb::handle given, int kind, int destination, uint64_t tag, double seconds) {
  const GivenHeader header(static_cast<uint16_t>(kind), destination, given);
  if (header.data() == nullptr) return nb::bool_(false);
  MessageRequest request{OpKind::kSend,
                         header.data(),
                         kHeaderBytes,
                         Dtype::kUint8,
                         site("send").checked_peer(destination, "destination"),
                         tag};
  require_outside_transfer("send");
  engine_->require_not_forked();
  request.source = engine_->source_line();
  run_message(request, seconds);
  return nb::bool_(true);
}

nb::object PythonGroup::try_send_objects(nb::handle objects, int kind, nb::handle dst, uint64_t tag) {
  const nb::int_ any_tag(0);
  const std::optional<Message> to = ordinary_message(dst, any_tag);
  const bool is_ordinary = to && to->peer != group_->rank() && PyList_CheckExact(objects.ptr()) && !has_backend();
  return is_ordinary ? send_objects(objects, kind, to->peer, tag, seconds_in_force()) : nb::object(nb::bool_(false));
}

nb::object PythonGroup::recv_objects(int kind, int count, int source, uint64_t tag, nb::handle loads, double seconds) {
  const nb::object made = unwritten_header();
  require_outside_transfer("recv");
  engine_->require_not_forked();
  MessageRequest request{OpKind::kRecv, PyBytes_AsString(made.ptr()), kHeaderBytes,
                         Dtype::kUint8, checked_source(source),       tag};
  request.source = engine_->source_line();
  const int sender = run_message(request, seconds);
  const std::optional<nb::list> streams =
      ReceivedHeader(made).streams(static_cast<uint16_t>(kind), group_->rank(), count);
  if (!streams) return nb::make_tuple(made, sender, nb::none(), nb::none());
  Loaded loaded;
  const bool are_loaded = loaded.load(*streams, sender, loads, -1);
  return nb::make_tuple(made, sender, are_loaded ? nb::object(loaded.objects[0]) : nb::none(), loaded.failed);
}

}  // namespace procgroup

using namespace procgroup;

void bind_object_headers(nb::module_& module) {
  module.attr("OBJECT_HEADER_BYTES") = kHeaderBytes;
  module.attr("OBJECT_INLINE_BYTES") = kInlineBytes;
  module.def("pack_object_header", &pack_header, "kind"_a, "root"_a, "count"_a, "failed"_a, "metadata_size"_a,
             "payload_size"_a, "inline"_a, "Return a header as bytes.");
  module.def("unpack_object_header", &unpack_header, "raw"_a,
             nb::sig("def unpack_object_header(raw: object) -> tuple[int, int, int, bool, int, int, bytes] | None"),
             "Return the arguments of pack_object_header; None for what is not a header.");
  module.def("pack_whole_objects", &pack_whole_objects, "kind"_a, "root"_a, "names"_a, "streams"_a,
             nb::sig("def pack_whole_objects(kind: int, root: int, names: list[bytes], streams: list[bytes]) "
                     "-> bytes | None"),
             "Return the header that holds these objects, named by their types, as a whole; None where none can.");
  module.def("whole_objects", &whole_objects, "headers"_a, "kind"_a, "root"_a, "count"_a,
             nb::sig("def whole_objects(headers: list[bytes], kind: int, root: int, count: int) "
                     "-> list[list[bytes]] | None"),
             "Return the streams in each header; None unless all are of this call and hold their objects as a whole.");
}
