// The Python module mindspeed_llm.data._byte_bpe; mindspeed_llm/data/byte_bpe.py is its only caller.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "byte_bpe.h"

namespace py = pybind11;
namespace bpe = mindspeed::byte_bpe;

namespace {

// Raised with any change of a signature below: Python refuses a module built from other sources.
constexpr int kInterface = 1;

std::string_view utf8(py::handle text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data == nullptr) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

// The characters that stand for bytes in a vocabulary: printable Latin-1 for itself, the others from U+0100 on.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    for (int& byte : byte_of_) byte = -1;
    int next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      byte_of_[printable ? byte : next++] = byte;
    }
  }

  // The bytes that a token stands for; false when a character is none of the alphabet.
  bool decode(std::string_view token, std::string& bytes) const {
    bytes.clear();
    for (size_t i = 0; i < token.size(); ++i) {
      unsigned c = static_cast<uint8_t>(token[i]);
      if (c >= 0x80) {
        if (c >= 0xC8) return false;  // from U+0200 on
        c = (c & 0x1F) << 6 | (static_cast<uint8_t>(token[++i]) & 0x3F);
      }
      if (byte_of_[c] < 0) return false;
      bytes.push_back(static_cast<char>(byte_of_[c]));
    }
    return true;
  }

 private:
  int byte_of_[512];
};

bpe::TokenTable read_vocabulary(const ByteAlphabet& alphabet, const py::dict& tokens) {
  bpe::TokenTable vocabulary(tokens.size());
  std::string bytes;
  // A token outside the alphabet cannot come out of any text.
  for (const auto& [token, id] : tokens)
    if (alphabet.decode(utf8(token), bytes)) vocabulary.set(bytes, id.cast<int32_t>());
  return vocabulary;
}

bpe::Merges read_merges(const ByteAlphabet& alphabet, const py::list& pairs) {
  bpe::Merges merges;
  std::string bytes;
  const auto append = [&](std::string_view token) {
    if (!alphabet.decode(token, bytes)) throw std::invalid_argument("a merge has a character that is no byte");
    merges.append(bytes);
  };
  for (const py::handle pair : pairs) {
    if (PyUnicode_Check(pair.ptr())) {
      const std::string_view line = utf8(pair);
      const size_t space = line.find(' ');
      // The library passes over lines that start so, as if they were the first of a merges.txt.
      if (space == line.npos || line.find(' ', space + 1) != line.npos || line.rfind("#version", 0) == 0)
        throw std::invalid_argument("a merge is not two tokens");
      append(line.substr(0, space));
      append(line.substr(space + 1));
    } else {
      const auto both = py::reinterpret_borrow<py::list>(pair);
      if (!PyList_Check(pair.ptr()) || both.size() != 2) throw std::invalid_argument("a merge is not two tokens");
      append(utf8(both[0]));
      append(utf8(both[1]));
    }
  }
  return merges;
}

bpe::AddedTokens read_added(const py::dict& tokens) {
  bpe::AddedTokens added;
  for (const auto& [content, id] : tokens) added.add(utf8(content), id.cast<int32_t>());
  return added;
}

std::unique_ptr<bpe::ByteBpe> make(int pattern, bool ignore_merges, std::vector<int32_t> prefix,
                                   std::vector<int32_t> suffix, const py::bytes& majors, const py::dict& vocabulary,
                                   const py::list& merges, const py::dict& raw_added,
                                   const py::dict& normalized_added) {
  if (pattern < 0 || pattern > 3) throw std::invalid_argument("pattern: 0 to 3");
  const ByteAlphabet alphabet;
  const auto table = static_cast<std::string_view>(majors);
  return std::make_unique<bpe::ByteBpe>(
      bpe::Settings{static_cast<bpe::Pattern>(pattern), ignore_merges, std::move(prefix), std::move(suffix)},
      bpe::Classes(reinterpret_cast<const uint8_t*>(table.data()), table.size()),
      read_vocabulary(alphabet, vocabulary), read_merges(alphabet, merges), read_added(raw_added),
      read_added(normalized_added));
}

py::tuple encode(const bpe::ByteBpe& self, const py::sequence& texts) {
  const py::tuple held(texts);  // keeps the strings alive, whatever happens to the sequence meanwhile
  std::vector<std::string_view> views;
  views.reserve(held.size());
  for (const py::handle text : held) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_Check(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
    if (PyErr_Occurred()) PyErr_Clear();  // a surrogate on its own: no data, like None
    views.emplace_back(data, static_cast<size_t>(size));
  }
  py::array_t<int32_t> lengths(static_cast<py::ssize_t>(views.size()));
  bpe::Ids ids;
  ids.reserve_more(1);  // there is an address to give away even when there are no ids
  int32_t* const counts = lengths.mutable_data();
  {
    py::gil_scoped_release unlocked;
    self.encode(views, ids, counts);
  }
  const auto size = static_cast<py::ssize_t>(ids.size());
  int32_t* const data = ids.release();
  const py::capsule owner(data, std::free);
  return py::make_tuple(py::array_t<int32_t>(size, data, owner), lengths);
}

}  // namespace

PYBIND11_MODULE(_byte_bpe, m) {
  m.doc() = "Byte-level byte pair encoding of mindspeed_llm.data.byte_bpe.";
  m.attr("INTERFACE") = kInterface;
  py::class_<bpe::ByteBpe>(m, "ByteBpe")
      .def(py::init(&make), py::arg("pattern"), py::arg("ignore_merges"), py::arg("prefix"), py::arg("suffix"),
           py::arg("majors"), py::arg("vocabulary"), py::arg("merges"), py::arg("raw_added"),
           py::arg("normalized_added"))
      .def("encode", &encode, py::arg("texts"));
}
