#include "io/torch_pickle.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "io/checkpoint.h"

namespace llmserve {
namespace {

// Values and tensors a file may make at most, and bytes of a text: a dictionary of some thousand
// tensors makes a tenth of them. A few bytes of a pickle copy what they refer to, so that what is
// copied is short: a function's name, a record's.
constexpr size_t kMaxValues = 1 << 20;
constexpr size_t kMaxTensors = 1 << 16;
constexpr int64_t kMaxTextBytes = 1024;
constexpr size_t kMaxNameBytes = 64;

struct StorageRow {
  std::string_view name;
  DType dtype;
};
constexpr StorageRow kStorages[] = {
    {"torch FloatStorage", DType::kF32}, {"torch BFloat16Storage", DType::kBF16},
    {"torch HalfStorage", DType::kF16},  {"torch DoubleStorage", DType::kF64},
    {"torch LongStorage", DType::kI64},  {"torch IntStorage", DType::kI32},
    {"torch ShortStorage", DType::kI16}, {"torch CharStorage", DType::kI8},
    {"torch ByteStorage", DType::kU8},   {"torch BoolStorage", DType::kBool},
};

// Values refer to each other by their places in one list, so that a text that refers to itself
// harms nobody.
struct Value {
  enum class Kind : uint8_t {
    kNone,
    kInt,
    kText,
    kGlobal,
    kTuple,
    kDict,
    kStorage,
    kTensor,
    kMark
  };
  Kind kind = Kind::kNone;
  int64_t number = 0;
  std::string text;           // of a text or a global "module name"; a storage's record
  std::vector<size_t> items;  // of a tuple or list; of a dictionary key, value, key, value …
  size_t tensor = 0;          // into the tensors; of a storage too
};

class Machine {
 public:
  Machine(std::span<const std::byte> pickle, const std::string& where)
      : pickle_(pickle), where_(where) {}

  std::vector<PickledTensor> run() {
    while (step()) {
    }
    const Value& root = at(pop());
    if (root.kind != Value::Kind::kDict)
      refuse("holds no dictionary; one of tensors by their names is read");
    if (root.items.size() / 2 > kMaxTensors) refuse("describes too many tensors");
    std::vector<PickledTensor> found;
    for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
      const Value& key = at(root.items[i]);
      const Value& value = at(root.items[i + 1]);
      if (key.kind != Value::Kind::kText || value.kind != Value::Kind::kTensor)
        refuse(concat("entry ", i / 2, " of its dictionary is not a tensor by its name"));
      PickledTensor& tensor = found.emplace_back(tensors_[value.tensor]);
      tensor.name = key.text;
    }
    return found;
  }

 private:
  using Kind = Value::Kind;

  [[noreturn]] void fail(std::string_view reason) const {
    throw CorruptFile(concat(where_, ", byte ", place_, " of its pickle: ", reason));
  }
  [[noreturn]] void refuse(std::string_view reason) const {
    throw NotSupported(
        concat(where_, ": ", reason, "; save its state_dict() alone, as safetensors"));
  }

  std::span<const std::byte> take(int64_t num_bytes) {
    if (num_bytes < 0 || num_bytes > std::ssize(pickle_) - place_) fail("breaks off");
    const auto taken = pickle_.subspan(static_cast<size_t>(place_), static_cast<size_t>(num_bytes));
    place_ += num_bytes;
    return taken;
  }
  // Little-endian; signed if it is whole.
  int64_t take_int(int num_bytes, bool is_signed = false) {
    uint64_t number = 0;
    const auto bytes = take(num_bytes);
    for (int i = 0; i < num_bytes; ++i)
      number |= static_cast<uint64_t>(bytes[static_cast<size_t>(i)]) << (8 * i);
    if (is_signed && num_bytes < 8 && num_bytes > 0 && (number >> (8 * num_bytes - 1) & 1) != 0)
      number |= ~uint64_t{0} << (8 * num_bytes);
    return static_cast<int64_t>(number);
  }
  std::string take_text(int64_t num_bytes) {
    if (num_bytes > kMaxTextBytes) fail(concat("a text of ", num_bytes, " bytes"));
    const auto bytes = take(num_bytes);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::string take_line() {
    std::string line;
    for (char c = 0; (c = static_cast<char>(take(1)[0])) != '\n';) {
      line += c;
      if (std::ssize(line) > kMaxTextBytes) fail("a line without an end");
    }
    return line;
  }

  Value& at(size_t id) { return values_[id]; }
  Value& push(Kind kind) {
    if (values_.size() == kMaxValues) refuse("describes too many values");
    stack_.push_back(values_.size());
    Value& value = values_.emplace_back();
    value.kind = kind;
    return value;
  }
  void push_int(int64_t number) { push(Kind::kInt).number = number; }
  void push_global(const std::string& module, const std::string& name) {
    if (module.size() + name.size() > kMaxNameBytes)
      refuse(concat("refers to ", module.substr(0, kMaxNameBytes), " ",
                    name.substr(0, kMaxNameBytes)));
    push(Kind::kGlobal).text = module + " " + name;
  }
  size_t pop() {
    if (stack_.empty()) fail("takes a value where there is none");
    const size_t id = stack_.back();
    stack_.pop_back();
    return id;
  }
  // All above the last mark, which goes.
  std::vector<size_t> pop_to_mark() {
    size_t first = stack_.size();
    while (first > 0 && at(stack_[first - 1]).kind != Kind::kMark) --first;
    if (first == 0) fail("there is no mark");
    std::vector<size_t> items(stack_.begin() + static_cast<int64_t>(first), stack_.end());
    stack_.resize(first - 1);
    return items;
  }
  size_t top() {
    if (stack_.empty()) fail("takes a value where there is none");
    return stack_.back();
  }
  Value& top_of(Kind kind) {
    Value& value = at(top());
    if (value.kind != kind) fail("a value of another kind than was expected");
    return value;
  }
  void push_tuple(int count) {
    std::vector<size_t> items(static_cast<size_t>(count));
    for (auto item = items.rbegin(); item != items.rend(); ++item) *item = pop();
    push(Kind::kTuple).items = std::move(items);
  }
  void remember(int64_t key) {
    // Keys are given out one after another.
    if (key < 0 || key > static_cast<int64_t>(kMaxValues)) fail("a memo's number");
    if (std::ssize(memo_) <= key) memo_.resize(static_cast<size_t>(key) + 1, kNothing);
    memo_[static_cast<size_t>(key)] = top();
  }
  void recall(int64_t key) {
    if (key < 0 || key >= std::ssize(memo_) || memo_[static_cast<size_t>(key)] == kNothing)
      fail("a value that was not remembered");
    stack_.push_back(memo_[static_cast<size_t>(key)]);
  }
  void append_to(Kind kind, std::vector<size_t> items) {
    if (kind == Kind::kDict && items.size() % 2 != 0) fail("a key without a value");
    num_items_ += items.size();
    if (num_items_ > kMaxValues) refuse("describes too many values");
    Value& to = top_of(kind);
    to.items.insert(to.items.end(), items.begin(), items.end());
  }

  const Value& item(const Value& of, size_t idx, Kind kind) {
    if (idx >= of.items.size() || at(of.items[idx]).kind != kind)
      fail("a tensor is described otherwise than by torch");
    return at(of.items[idx]);
  }
  std::vector<int64_t> ints(const Value& tuple) {
    if (tuple.items.size() > TensorShape::kMaxDims) fail("a tensor of too many dimensions");
    std::vector<int64_t> numbers;
    for (const size_t id : tuple.items) {
      if (at(id).kind != Kind::kInt || at(id).number < 0) fail("a size that is no number");
      numbers.push_back(at(id).number);
    }
    return numbers;
  }

  // ('storage', torch.FloatStorage, '0', 'cpu', 12)
  void load_persistent() {
    const Value of = at(pop());
    if (of.kind != Kind::kTuple || item(of, 0, Kind::kText).text != "storage")
      refuse("refers to something else than a tensor's values");
    const std::string& type = item(of, 1, Kind::kGlobal).text;
    const auto* const row = std::ranges::find(kStorages, type, &StorageRow::name);
    if (row == std::end(kStorages)) refuse(concat("has values of type ", type));
    const std::string& record = item(of, 2, Kind::kText).text;
    if (record.size() > kMaxNameBytes) fail("a record of a long name");
    PickledTensor tensor{
        .storage = record, .dtype = row->dtype, .storage_elements = item(of, 4, Kind::kInt).number};
    push(Kind::kStorage).tensor = tensors_.size();
    tensors_.push_back(std::move(tensor));
  }

  // What torch calls to make its tensors and dictionaries; nothing else is called.
  void reduce() {
    const Value arguments = at(pop());
    const Value callee = at(pop());
    if (callee.kind != Kind::kGlobal || arguments.kind != Kind::kTuple)
      fail("calls what is no function");
    if (callee.text == "collections OrderedDict") {
      push(Kind::kDict);
    } else if (callee.text == "torch._utils _rebuild_tensor_v2") {
      PickledTensor tensor = tensors_[item(arguments, 0, Kind::kStorage).tensor];
      tensor.offset = item(arguments, 1, Kind::kInt).number;
      tensor.shape = ints(item(arguments, 2, Kind::kTuple));
      tensor.strides = ints(item(arguments, 3, Kind::kTuple));
      push(Kind::kTensor).tensor = tensors_.size();
      tensors_.push_back(std::move(tensor));
    } else if (callee.text == "torch._utils _rebuild_parameter") {
      const size_t tensor = item(arguments, 0, Kind::kTensor).tensor;
      push(Kind::kTensor).tensor = tensor;
    } else {
      refuse(concat("asks for a call of ", callee.text, ", and calls are not made"));
    }
  }

  // False at the end.
  bool step() {
    const auto opcode = static_cast<unsigned char>(take(1)[0]);
    switch (opcode) {
      case '.':
        return false;
      case 0x80:  // PROTO
        if (const int64_t protocol = take_int(1); protocol < 2 || protocol > 5)
          refuse(concat("is a pickle of protocol ", protocol));
        return true;
      case 0x95:  // FRAME
        take_int(8);
        return true;
      case '(':
        push(Kind::kMark);
        return true;
      case '0':  // POP
        pop();
        return true;
      case 'N':
        push(Kind::kNone);
        return true;
      case 0x88:  // NEWTRUE
      case 0x89:  // NEWFALSE
        push_int(opcode == 0x88 ? 1 : 0);
        return true;
      case 'J':
        push_int(take_int(4, true));
        return true;
      case 'K':
        push_int(take_int(1));
        return true;
      case 'M':
        push_int(take_int(2));
        return true;
      case 0x8a: {  // LONG1
        const int64_t size = take_int(1);
        if (size > 8) fail("a number of more than 8 bytes");
        push_int(take_int(static_cast<int>(size), true));
        return true;
      }
      case 'G':  // a float, which no tensor needs
        take(8);
        push(Kind::kNone);
        return true;
      case 'X':
        push(Kind::kText).text = take_text(take_int(4));
        return true;
      case 0x8c:  // SHORT_BINUNICODE
        push(Kind::kText).text = take_text(take_int(1));
        return true;
      case 'c': {
        const std::string module = take_line();
        push_global(module, take_line());
        return true;
      }
      case 0x93: {  // STACK_GLOBAL
        const std::string name = top_of(Kind::kText).text;
        pop();
        const std::string module = top_of(Kind::kText).text;
        pop();
        push_global(module, name);
        return true;
      }
      case '}':
        push(Kind::kDict);
        return true;
      case ']':
      case ')':
        push(Kind::kTuple);
        return true;
      case 't': {
        std::vector<size_t> items = pop_to_mark();
        push(Kind::kTuple).items = std::move(items);
        return true;
      }
      case 0x85:
      case 0x86:
      case 0x87:
        push_tuple(opcode - 0x84);
        return true;
      case 's': {
        const size_t value = pop();
        const size_t key = pop();
        append_to(Kind::kDict, {key, value});
        return true;
      }
      case 'u': {
        std::vector<size_t> items = pop_to_mark();
        append_to(Kind::kDict, std::move(items));
        return true;
      }
      case 'a': {
        const size_t value = pop();
        append_to(Kind::kTuple, {value});
        return true;
      }
      case 'e': {
        std::vector<size_t> items = pop_to_mark();
        append_to(Kind::kTuple, std::move(items));
        return true;
      }
      case 'b':  // BUILD: attributes of a dictionary, which hold versions of modules
        pop();
        top_of(Kind::kDict);
        return true;
      case 'q':
        remember(take_int(1));
        return true;
      case 'r':
        remember(take_int(4));
        return true;
      case 0x94:  // MEMOIZE
        remember(std::ssize(memo_));
        return true;
      case 'h':
        recall(take_int(1));
        return true;
      case 'j':
        recall(take_int(4));
        return true;
      case 'Q':
        load_persistent();
        return true;
      case 'R':
        reduce();
        return true;
      default:
        refuse(concat("has the opcode ", static_cast<int>(opcode),
                      ", which no dictionary of tensors needs"));
    }
  }

  static constexpr size_t kNothing = ~size_t{0};

  const std::span<const std::byte> pickle_;
  const std::string& where_;
  int64_t place_ = 0;
  std::vector<Value> values_;
  std::vector<size_t> stack_;  // into values_
  std::vector<size_t> memo_;
  std::vector<PickledTensor> tensors_;
  size_t num_items_ = 0;
};

}  // namespace

std::vector<PickledTensor> read_pickled_tensors(std::span<const std::byte> pickle,
                                                const std::string& where) {
  return Machine(pickle, where).run();
}

}  // namespace llmserve
