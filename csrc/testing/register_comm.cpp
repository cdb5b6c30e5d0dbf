// Communicators on the arrays of a backend, for tests: nothing else uses them yet.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/nccl_communicator.h"
#include "comm/registry.h"
#include "core/error.h"
#include "kernels/backend.h"
#include "kernels/cuda_loader.h"
#include "layers/expert_placement.h"
#include "testing/register.h"
#include "testing/staging.h"

namespace py = pybind11;

namespace llmserve {
namespace {

Reduction parse_reduction(const std::string& text) {
  if (text == "sum") return Reduction::kSum;
  if (text == "max") return Reduction::kMax;
  throw InvalidArgument(concat("reduction: expected sum or max, got ", text));
}

// Of host backends' arrays, which are NumPy's, or DeviceArrays.
Tensor tensor_of(const py::object& array) {
  if (py::isinstance<DeviceArray>(array)) return array.cast<DeviceArray&>().view;
  auto numpy = array.cast<py::array>();
  return host_view(numpy);
}

NcclLibrary open(const std::string& folder) {
  if (folder.empty()) return open_nccl();
  const std::string folders[] = {folder};
  return open_nccl(folders);
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// `is_done` stands for a device's queue where there is none.
RankPlace place_of(Backend& backend,
                   const std::optional<std::function<bool()>>& is_done = std::nullopt) {
  RankPlace place{.memory = &backend.memory()};
  if (!backend.memory().is_host()) {
    place.queue = cuda_queue(backend);
    return place;
  }
  place.queue.is_done = is_done.value_or([] { return true; });
  place.queue.copy_rows = [](const RowCopy& copy) {
    for (int64_t row = 0; row < copy.num_rows; ++row)
      std::memcpy(static_cast<std::byte*>(copy.to) + row * copy.to_stride,
                  static_cast<const std::byte*>(copy.from) + row * copy.from_stride,
                  static_cast<size_t>(copy.row_bytes));
  };
  return place;
}

// A rank whose group the library alone knows.
std::unique_ptr<Communicator> make_nccl(Backend& backend, const std::string& folder, int rank,
                                        int world_size, double timeout_s,
                                        const std::optional<std::function<bool()>>& is_done) {
  NcclLibrary library = open(folder);
  const RankPlace place = place_of(backend, is_done);
  NcclOptions options{.rank = rank,
                      .world_size = world_size,
                      .queue = place.queue,
                      .memory = place.memory,
                      .timeout = milliseconds(timeout_s)};
  options.id = make_nccl_id(library);
  const py::gil_scoped_release release;
  return std::make_unique<NcclCommunicator>(std::move(library), std::move(options));
}

std::unique_ptr<CommunicatorGroup> make_group(const std::string& name, int world_size,
                                              double timeout_s, const std::string& folder) {
  GroupOptions options{.world_size = world_size, .timeout = milliseconds(timeout_s)};
  if (!folder.empty()) options.library_folders = {folder};
  return find_communicator(name).make(options);
}

// Calls of a communicator: other ranks are threads of Python, too, and need the GIL.
void register_calls(py::class_<Communicator>& communicator) {
  using namespace py::literals;
  using Counts = std::vector<int64_t>;
  communicator
      .def(
          "all_reduce",
          [](Communicator& self, const py::object& data, const std::string& reduction) {
            const Tensor tensor = tensor_of(data);
            const Reduction parsed = parse_reduction(reduction);
            const py::gil_scoped_release release;
            self.all_reduce(tensor, parsed);
          },
          "data"_a, "reduction"_a = "sum")
      .def(
          "all_gather",
          [](Communicator& self, const py::object& x, const py::object& out, const Counts& counts) {
            const Tensor from = tensor_of(x);
            const Tensor to = tensor_of(out);
            const py::gil_scoped_release release;
            self.all_gather(from, to, counts);
          },
          "x"_a, "out"_a, "counts"_a = Counts())
      .def(
          "gather_columns",
          [](Communicator& self, const py::object& x, const py::object& out, const Counts& counts,
             int to) {
            const Tensor from = tensor_of(x);
            const Tensor gathered = out.is_none() ? Tensor() : tensor_of(out);
            const py::gil_scoped_release release;
            self.gather_columns(from, gathered, counts, to);
          },
          "x"_a, "out"_a, "counts"_a, "to"_a = Communicator::kAll)
      .def(
          "reduce_scatter",
          [](Communicator& self, const py::object& x, const py::object& out,
             const std::string& reduction, const Counts& counts) {
            const Tensor from = tensor_of(x);
            const Tensor to = tensor_of(out);
            const Reduction parsed = parse_reduction(reduction);
            const py::gil_scoped_release release;
            self.reduce_scatter(from, to, parsed, counts);
          },
          "x"_a, "out"_a, "reduction"_a = "sum", "counts"_a = Counts())
      .def(
          "all_to_all",
          [](Communicator& self, const py::object& x, const py::object& out,
             const Counts& send_counts, const Counts& receive_counts) {
            const Tensor from = tensor_of(x);
            const Tensor to = tensor_of(out);
            const py::gil_scoped_release release;
            self.all_to_all(from, to, send_counts, receive_counts);
          },
          "x"_a, "out"_a, "send_counts"_a = Counts(), "receive_counts"_a = Counts())
      .def(
          "broadcast",
          [](Communicator& self, const py::object& data, int root) {
            const Tensor tensor = tensor_of(data);
            const py::gil_scoped_release release;
            self.broadcast(tensor, root);
          },
          "data"_a, "root"_a = 0)
      .def(
          "send",
          [](Communicator& self, const py::object& x, int to) {
            const Tensor tensor = tensor_of(x);
            const py::gil_scoped_release release;
            self.send(tensor, to);
          },
          "x"_a, "to"_a)
      .def(
          "recv",
          [](Communicator& self, const py::object& out, int from) {
            const Tensor tensor = tensor_of(out);
            const py::gil_scoped_release release;
            self.recv(tensor, from);
          },
          "out"_a, "from_rank"_a);
}

std::vector<std::vector<int32_t>> copies_of(const ExpertHomes& homes) {
  std::vector<std::vector<int32_t>> copies;
  for (int64_t e = 0; e < homes.num_experts(); ++e)
    copies.emplace_back(homes.of(e).begin(), homes.of(e).end());
  return copies;
}

}  // namespace

void register_testing_comm(py::module_& testing) {
  using namespace py::literals;
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Communicator> communicator(testing, "Communicator");
  communicator.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def_property_readonly("description", &Communicator::description)
      .def("wait", &Communicator::wait, Unlocked())
      .def("barrier", &Communicator::barrier, Unlocked())
      .def("check", &Communicator::check)
      .def("abort", &Communicator::abort);
  register_calls(communicator);
  py::class_<CommunicatorGroup>(testing, "CommunicatorGroup")
      .def(
          "join",
          [](CommunicatorGroup& self, int rank, Backend& backend) {
            const RankPlace place = place_of(backend);
            const py::gil_scoped_release release;
            return self.join(rank, place);
          },
          "rank"_a, "backend"_a, py::keep_alive<0, 3>());
  testing.def("communicator_group", &make_group, "name"_a, "world_size"_a = 1, py::kw_only(),
              "timeout_s"_a = 60.0, "folder"_a = "");
  testing.def(
      "communicators",
      [] {
        std::vector<std::pair<std::string, std::string>> rows;
        for (const CommunicatorRow& row : communicator_registry())
          rows.emplace_back(row.name, row.summary);
        return rows;
      },
      "(name, summary) of every kind.");
  testing.def("nccl_communicator", &make_nccl, "backend"_a, py::kw_only(), "folder"_a = "",
              "rank"_a = 0, "world_size"_a = 1, "timeout_s"_a = 60.0, "is_done"_a = py::none(),
              py::keep_alive<0, 1>());
  testing.def(
      "nccl_library",
      [](const std::string& folder) {
        const NcclLibrary library = open(folder);
        return py::make_tuple(library.path, library.version, library.description());
      },
      "folder"_a = "", "(path, version, description)");
  testing.def(
      "place_experts",
      [](int64_t num_experts, int32_t num_ranks, const std::vector<std::vector<int64_t>>& loads,
         int64_t num_redundant) {
        ExpertHomes homes(num_experts, num_ranks);
        for (const std::vector<int64_t>& rows : loads) homes = homes.packed(rows, num_redundant);
        return copies_of(homes);
      },
      "num_experts"_a, "num_ranks"_a, "loads"_a, "num_redundant"_a = 0,
      "The ranks of each expert's copies, packed by each of `loads` [X] in turn.");
  testing.def(
      "move_experts",
      [](int64_t num_experts, int32_t num_ranks, const std::vector<std::vector<int64_t>>& loads,
         int64_t num_redundant) {
        ExpertHomes homes(num_experts, num_ranks);
        ExpertPlaces places(homes);
        py::list packings;
        for (const std::vector<int64_t>& rows : loads) {
          homes = homes.packed(rows, num_redundant, places.room());
          py::list moves;
          for (const ExpertMove& move : places.arrange(homes))
            moves.append(
                py::make_tuple(move.from_rank, move.from_place, move.to_rank, move.to_place));
          py::list tables;
          for (int32_t rank = 0; rank < num_ranks; ++rank) {
            std::vector<int32_t> table(static_cast<size_t>(3 * num_experts));
            places.write(homes, rank, table);
            tables.append(table);
          }
          packings.append(py::make_tuple(copies_of(homes), moves, tables));
        }
        return packings;
      },
      "num_experts"_a, "num_ranks"_a, "loads"_a, "num_redundant"_a,
      "For each of `loads` [X]: the ranks of each expert's copies; what moves, as (rank, place, "
      "rank, place); and each rank's (copies, its own or -1, its place) of every expert, flat.");
  testing.def(
      "assign_rows",
      [](const std::vector<int32_t>& ids, int64_t num_experts, int32_t num_ranks,
         const std::vector<int64_t>& loads, int64_t num_redundant, double factor) {
        ExpertHomes homes(num_experts, num_ranks);
        if (!loads.empty()) homes = homes.packed(loads, num_redundant);
        RowAssigner assigner;
        const auto ranks = assigner.assign(ids, homes, factor);
        return py::make_tuple(copies_of(homes), std::vector<int32_t>(ranks.begin(), ranks.end()));
      },
      "ids"_a, "num_experts"_a, "num_ranks"_a, "loads"_a, "num_redundant"_a, "factor"_a,
      "(the ranks of each expert's copies, the rank of each row)");
}

}  // namespace llmserve
