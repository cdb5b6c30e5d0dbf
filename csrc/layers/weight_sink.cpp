#include "layers/weight_sink.h"

#include <algorithm>
#include <atomic>
#include <span>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "kernels/host_ops.h"
#include "kernels/unchecked_packing.h"
#include "layers/stored_tensor.h"

namespace llmserve {
namespace {

// A part of one of several vectors, which is `view`.
void add_vector(const ConstTensor& view, const WeightPart& part, std::vector<float>& values) {
  std::vector<float> all(static_cast<size_t>(view.num_elements()));
  convert_to_f32(view, 0, view.num_elements(), all.data());
  for (int64_t n = 0; n < part.size; ++n)
    values.push_back(all[static_cast<size_t>(part.begin + n * part.step)]);
}

class PlanSink final : public WeightSink {
 public:
  LinearWeight linear(LinearWeight planned, const StackedRows&) override { return planned; }
  VectorWeight vector(const StackedRows&) override { return {}; }
  VectorWeight constant(int64_t, float) override { return {}; }
  void table(const TensorEntry&, TableWeight&) override {}
};

void quantize_row(const LinearFormat& format, const ConstTensor& values, const QuantizedRow& row) {
  const int64_t k = values.num_elements();
  if (values.dtype == DType::kF32) return quantize_row(format, values.as<float>(), k, row);
  thread_local std::vector<float> floats;
  floats.resize(static_cast<size_t>(k));
  convert_to_f32(values, 0, k, floats.data());
  quantize_row(format, floats.data(), k, row);
}

// Which of some stacked matrices a row is in, and where there.
class RowStarts {
 public:
  template <class Matrices, class NumRows>
  RowStarts(const Matrices& matrices, NumRows num_rows) {
    for (const auto& matrix : matrices) starts_.push_back(starts_.back() + num_rows(matrix));
  }
  std::pair<size_t, int64_t> find(int64_t row) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), row);
    const size_t matrix = static_cast<size_t>(after - starts_.begin()) - 1;
    return {matrix, row - starts_[matrix]};
  }

 private:
  std::vector<int64_t> starts_{0};
};

// A stack's values in host memory, in place as far as they can be.
struct StackedValues {
  std::vector<ConstTensor> views;  // of the parts
  std::vector<Buffer> copies;      // of those that are not in the file as they are
  bool are_in_file() const {
    return std::ranges::none_of(copies, [](const Buffer& copy) { return copy.data() != nullptr; });
  }
};

// Packs each weight as it comes, and lets go of the file's pages.
class PackSink : public WeightSink {
 public:
  PackSink(const WeightSource& source, WeightReport& report)
      : source_(source),
        report_(report),
        unchecked_(dynamic_cast<UncheckedPacking*>(&source.backend())) {}

  LinearWeight linear(LinearWeight planned, const StackedRows& rows) override {
    LinearWeight weight = rows.format ? pack_stored(planned, rows) : pack_values(planned, rows);
    if (!weight.rows) source_.release(rows);
    return weight;
  }

  VectorWeight vector(const StackedRows& rows) override {
    std::vector<float> values;
    for (size_t i = 0; i < rows.parts.size(); ++i) {
      const Stopwatch reading(report_.read_us);
      Buffer copy;
      const WeightPart& part = rows.parts[i];
      if (part.num_matrices > 0) {
        add_vector(source_.values(*rows.entries[i], DType::kF32, copy, part.matrix), part, values);
        continue;
      }
      const ConstTensor view = source_.values(*rows.entries[i], DType::kF32, copy);
      const int64_t width = part.width == 0 ? 1 : part.width;
      const size_t end = values.size();
      values.resize(end + static_cast<size_t>(part.size * width));
      convert_to_f32(view, part.begin * width, part.size * width, values.data() + end);
    }
    return bring_over(values);
  }

  VectorWeight constant(int64_t size, float value) override {
    return bring_over(std::vector<float>(static_cast<size_t>(size), value));
  }

  void table(const TensorEntry& entry, TableWeight& table) override {
    const Stopwatch reading(report_.read_us);
    const std::shared_ptr<const MappedFile>& file = source_.checkpoint().file(entry);
    if (unchecked_ && !table.blocks && is_in_place(source_.checkpoint(), entry)) {
      bring_over_table(entry, table);
      file->release(entry.offset, entry.num_bytes);
      return;
    }
    table.view = table.blocks ? source_.blocks(entry)
                              : source_.values(entry, source_.format().dtype, table.copy);
    if (!memory().is_host()) {
      Buffer on_device(table.view.num_bytes(), memory());
      memory().copy_from_host(on_device.data(), table.view.data, table.view.num_bytes());
      table.view.data = on_device.data();
      table.copy = std::move(on_device);
    } else if (!table.copy.data()) {
      table.file = file;
    }
    file->release(entry.offset, entry.num_bytes);
  }

 protected:
  // A weight of values that have been read.
  virtual LinearWeight pack(const LinearWeight& planned, const StackedRows& /*rows*/,
                            const StackedValues& values) {
    const Stopwatch packing(report_.pack_us);
    if (!planned.format) return backend().pack_linear(values.views, planned.dtype);
    const RowStarts starts(values.views, [](const ConstTensor& view) { return view.shape[0]; });
    return backend().pack_quantized(*planned.format, planned.out_features, planned.in_features,
                                    [&](int64_t n, const QuantizedRow& row) {
                                      const auto [part, within] = starts.find(n);
                                      quantize_row(*planned.format,
                                                   values.views[part].slice(0, within, 1), row);
                                    });
  }
  const WeightSource& source() const { return source_; }
  Backend& backend() const { return source_.backend(); }

 private:
  Memory& memory() const { return backend().memory(); }

  VectorWeight bring_over(const std::vector<float>& values) const {
    const int64_t num_bytes = std::ssize(values) * size_bytes(DType::kF32);
    VectorWeight weight{.size = std::ssize(values), .data = Buffer(num_bytes, memory())};
    memory().copy_from_host(weight.data.data(), values.data(), num_bytes);
    return weight;
  }

  StackedValues read(const StackedRows& rows, DType dtype) {
    StackedValues values{.copies = std::vector<Buffer>(rows.parts.size())};
    for (size_t i = 0; i < rows.parts.size(); ++i) {
      const Stopwatch reading(report_.read_us);
      values.views.push_back(source_.values(rows, i, dtype, values.copies[i]));
    }
    return values;
  }

  LinearWeight pack_values(const LinearWeight& planned, const StackedRows& rows) {
    if (unchecked_ && !planned.format && lie_as_they_are(rows))
      return pack_unchecked(planned, rows);
    return pack(planned, rows, read(rows, planned.dtype));
  }

  void bring_over_table(const TensorEntry& entry, TableWeight& table) {
    Buffer copy;  // none is needed
    table.view = host_values(source_.checkpoint(), entry, entry.dtype, backend(), copy);
    bool is_finite = true;
    table.copy = unchecked_->bring_over(table.view, is_finite);
    if (!is_finite) {
      source_.values(entry, source_.format().dtype, copy);  // names the value
      throw CorruptFile(concat(source_.checkpoint().path(), ": tensor \"", entry.name,
                               "\" has a value that is not finite"));
    }
    table.view.data = table.copy.data();
  }

  // Whether each part's rows are those of the file, in one piece.
  bool lie_as_they_are(const StackedRows& rows) const {
    if (rows.is_transposed || rows.columns.size != rows.in_features) return false;
    for (size_t i = 0; i < rows.parts.size(); ++i) {
      const WeightPart& part = rows.parts[i];
      if (rows.quantized[i] || rows.factors[i] != 1.0f || part.is_vector || part.step != 1 ||
          !is_in_place(source_.checkpoint(), *rows.entries[i]))
        return false;
    }
    return true;
  }

  // Values go to the device as the file is read, and are looked at on the way.
  LinearWeight pack_unchecked(const LinearWeight& planned, const StackedRows& rows) {
    bool is_finite = true;
    LinearWeight weight;
    {
      const Stopwatch packing(report_.pack_us);
      std::vector<ConstTensor> views;
      std::vector<Buffer> copies(rows.parts.size());  // empty
      for (size_t i = 0; i < rows.parts.size(); ++i) {
        const WeightPart& part = rows.parts[i];
        views.push_back(host_values(source_.checkpoint(), *rows.entries[i], planned.dtype,
                                    backend(), copies[i], {part.row(0), part.size}));
      }
      weight = unchecked_->pack_unchecked(views, planned.dtype, is_finite);
    }
    if (is_finite) return weight;
    read(rows, planned.dtype);  // names the value that is not
    throw CorruptFile(concat(source_.checkpoint().path(), ": tensor \"", rows.parts[0].name,
                             "\" has a value that is not finite"));
  }

  // As the file has it.
  LinearWeight pack_stored(const LinearWeight& planned, const StackedRows& rows) {
    const RowStarts starts(rows.parts, [](const WeightPart& part) { return part.size; });
    std::atomic<bool> is_finite{true};
    LinearWeight weight;
    {
      const Stopwatch packing(report_.pack_us);
      weight = backend().pack_quantized(*planned.format, planned.out_features, planned.in_features,
                                        [&](int64_t n, const QuantizedRow& row) {
                                          const auto [part, within] = starts.find(n);
                                          if (!source_.unpack(rows, part, within, row))
                                            is_finite = false;
                                        });
    }
    if (is_finite) return weight;
    read(rows, DType::kF32);  // names the value that is not, in the words of every other tensor
    throw CorruptFile(
        concat(source_.checkpoint().path(), ": tensor \"", rows.parts[0].name,
               "\" has a scale that is not finite, or a code that its format has not"));
  }

  const WeightSource& source_;
  WeightReport& report_;
  UncheckedPacking* const unchecked_;  // the backend, or null
};

// Leaves weights on their rows in the file where these are as they have to be.
class DeferSink final : public PackSink {
 public:
  DeferSink(const WeightSource& source, WeightReport& report, std::vector<DeferredWeight>& deferred)
      : PackSink(source, report), deferred_(deferred) {}

 private:
  LinearWeight pack(const LinearWeight& planned, const StackedRows& rows,
                    const StackedValues& values) override {
    if (planned.format || !values.are_in_file()) return PackSink::pack(planned, rows, values);
    LinearWeight weight = backend().defer_linear(values.views, planned.dtype);
    if (!weight.rows) return weight;
    DeferredWeight& deferred = deferred_.emplace_back(weight.rows);
    for (size_t i = 0; i < rows.entries.size(); ++i) {
      const TensorEntry& entry = *rows.entries[i];
      const int64_t row_bytes = planned.in_features * size_bytes(entry.dtype);
      deferred.add_source(source().checkpoint().file(entry),
                          entry.offset + rows.parts[i].row(0) * row_bytes,
                          rows.parts[i].size * row_bytes);
    }
    return weight;
  }

  std::vector<DeferredWeight>& deferred_;
};

// Takes linear weights from a file of packed ones where it has them, and notes them all.
class PackedFileSink final : public WeightSink {
 public:
  PackedFileSink(std::unique_ptr<WeightSink> otherwise, const Backend& backend,
                 PackedWeights& packed, WeightReport& report)
      : otherwise_(std::move(otherwise)), backend_(backend), packed_(packed), report_(report) {}

  LinearWeight linear(LinearWeight planned, const StackedRows& rows) override {
    const std::string name = rows.name();
    LinearWeight weight =
        take(name, planned) ? std::move(planned) : otherwise_->linear(std::move(planned), rows);
    packed_.tensors.push_back({name, {weight.bytes(), static_cast<size_t>(weight.num_bytes())}});
    return weight;
  }
  VectorWeight vector(const StackedRows& rows) override { return otherwise_->vector(rows); }
  VectorWeight constant(int64_t size, float value) override {
    return otherwise_->constant(size, value);
  }
  void table(const TensorEntry& entry, TableWeight& table) override {
    otherwise_->table(entry, table);
  }

 private:
  bool take(const std::string& name, LinearWeight& planned) {
    const int64_t n = planned.out_features;
    const int64_t k = planned.in_features;
    const int64_t num_bytes = planned.format ? backend_.packed_bytes(n, k, *planned.format)
                                             : backend_.packed_bytes(n, k, planned.dtype);
    if (packed_.file) planned.mapped = packed_.file->find(name, num_bytes);
    if (planned.mapped.empty()) {
      packed_.is_from_file = false;
      return false;
    }
    planned.file = packed_.file->file();
    report_.mapped_bytes += num_bytes;
    return true;
  }

  const std::unique_ptr<WeightSink> otherwise_;
  const Backend& backend_;
  PackedWeights& packed_;
  WeightReport& report_;
};

}  // namespace

std::unique_ptr<WeightSink> make_weight_sink(const WeightSinkOptions& options,
                                             const WeightSource& source, WeightReport& report) {
  std::unique_ptr<WeightSink> sink;
  if (!options.load)
    sink = std::make_unique<PlanSink>();
  else if (options.deferred)
    sink = std::make_unique<DeferSink>(source, report, *options.deferred);
  else
    sink = std::make_unique<PackSink>(source, report);
  if (!options.packed) return sink;
  return std::make_unique<PackedFileSink>(std::move(sink), source.backend(), *options.packed,
                                          report);
}

}  // namespace llmserve
