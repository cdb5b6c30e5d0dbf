// The fields of ops' Args as Python has them, in the order of Python's arguments: what the bindings
// of ops are made of (op_call.h), for tests and for llmserve.ops alike. One entry an op. An op has
// none where its arguments are not arrays, lists, weights and numbers alone, and is bound by hand:
//   paged_attention  the width of its block tables is a number of Args that Python does not give
//   sample           its rows are records with lists of their own
//   fused ops        their Args hold those of other ops, between which are arrays of the binding
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "kernels/ops.h"

namespace llmserve {

enum class FieldRole : uint8_t {
  kInput,          // has to be given
  kOptional,       // None: none
  kUpdated,        // an array that the op changes in place
  kCache,          // keys or values of a cache, changed or only read (cache_part_of)
  kResult,         // an array that is written and returned; None: a new one of result_shape()
  kInPlaceResult,  // likewise, and may be the first input itself
  kNumber,         // a number or a choice, whose default is that of Args
};

// `get` gives the field of an Args, whose constness it has.
template <FieldRole kFieldRole, class Get>
struct OpField {
  static constexpr FieldRole kRole = kFieldRole;
  const char* name;
  Get get;
};

namespace op_fields {

template <FieldRole kRole, class Get>
constexpr auto make(const char* name, Get get) {
  return std::tuple(OpField<kRole, Get>{name, get});
}
template <FieldRole kRole, class Args, class T>
constexpr auto make(const char* name, T Args::* member) {
  return make<kRole>(name, [member](auto& args) -> auto& { return args.*member; });
}

template <class Args, class T>
constexpr auto input(const char* name, T Args::* member) {
  return make<FieldRole::kInput>(name, member);
}
template <class Args, class T>
constexpr auto optional(const char* name, T Args::* member) {
  return make<FieldRole::kOptional>(name, member);
}
template <class Args, class T>
constexpr auto updated(const char* name, T Args::* member) {
  return make<FieldRole::kUpdated>(name, member);
}
template <class Args, class T>
constexpr auto result(const char* name, T Args::* member) {
  return make<FieldRole::kResult>(name, member);
}
template <class Args, class T>
constexpr auto in_place_result(const char* name, T Args::* member) {
  return make<FieldRole::kInPlaceResult>(name, member);
}
template <class Args, class T>
constexpr auto number(const char* name, T Args::* member) {
  return make<FieldRole::kNumber>(name, member);
}

// A struct of numbers within Args, one argument a number.
template <class Args, class Numbers, class... Fields>
constexpr auto numbers(Numbers Args::* member, const std::tuple<Fields...>& fields) {
  const auto within = [member](const auto& field) {
    return make<FieldRole::kNumber>(
        field.name, [member, field](auto& args) -> auto& { return field.get(args.*member); });
  };
  return std::apply([&](const auto&... each) { return std::tuple_cat(within(each)...); }, fields);
}

// The two arrays of a cache, and how the keys lie.
template <class Args>
constexpr auto cache_arrays(PagedKvCache Args::* member) {
  return std::tuple_cat(
      make<FieldRole::kCache>("key_cache",
                              [member](auto& args) -> auto& { return (args.*member).keys; }),
      make<FieldRole::kCache>("value_cache",
                              [member](auto& args) -> auto& { return (args.*member).values; }));
}
template <class Args>
constexpr auto key_layout(PagedKvCache Args::* member) {
  return make<FieldRole::kNumber>(
      "key_layout", [member](auto& args) -> auto& { return (args.*member).key_layout; });
}

inline constexpr auto kNormNumbers = std::tuple_cat(
    number("eps", &NormNumbers::eps), number("weight_offset", &NormNumbers::weight_offset),
    number("scale", &NormNumbers::scale));

inline constexpr auto kRouterNumbers = std::tuple_cat(
    number("score", &RouterNumbers::score), number("num_groups", &RouterNumbers::num_groups),
    number("top_groups", &RouterNumbers::top_groups),
    number("group_top", &RouterNumbers::group_top),
    number("normalises", &RouterNumbers::normalises),
    number("sum_floor", &RouterNumbers::sum_floor), number("sum_eps", &RouterNumbers::sum_eps),
    number("scale", &RouterNumbers::scale), number("jitter", &RouterNumbers::jitter));

}  // namespace op_fields

template <class Args>
inline constexpr std::nullptr_t kOpFields = nullptr;  // bound by hand

template <>
inline constexpr auto kOpFields<EmbeddingArgs> =
    std::tuple_cat(op_fields::input("table", &EmbeddingArgs::table),
                   op_fields::input("token_ids", &EmbeddingArgs::token_ids),
                   op_fields::number("scale", &EmbeddingArgs::scale),
                   op_fields::result("out", &EmbeddingArgs::out));
inline std::vector<int64_t> result_shape(const EmbeddingArgs& args) {
  return {std::ssize(args.token_ids), args.table.shape[1]};
}

template <>
inline constexpr auto kOpFields<RmsNormArgs> = std::tuple_cat(
    op_fields::input("x", &RmsNormArgs::x), op_fields::input("weight", &RmsNormArgs::weight),
    op_fields::numbers(&RmsNormArgs::numbers, op_fields::kNormNumbers),
    op_fields::in_place_result("out", &RmsNormArgs::out));
inline std::vector<int64_t> result_shape(const RmsNormArgs& args) {
  return {args.x.shape.begin(), args.x.shape.begin() + args.x.rank};
}

template <>
inline constexpr auto kOpFields<AddRmsNormArgs> = std::tuple_cat(
    op_fields::updated("residual", &AddRmsNormArgs::residual),
    op_fields::input("x", &AddRmsNormArgs::x), op_fields::input("weight", &AddRmsNormArgs::weight),
    op_fields::numbers(&AddRmsNormArgs::numbers, op_fields::kNormNumbers),
    op_fields::in_place_result("out", &AddRmsNormArgs::out));
inline std::vector<int64_t> result_shape(const AddRmsNormArgs& args) {
  return {args.x.shape[0], args.x.shape[1]};
}

template <>
inline constexpr auto kOpFields<LayerNormArgs> = std::tuple_cat(
    op_fields::input("x", &LayerNormArgs::x), op_fields::input("weight", &LayerNormArgs::weight),
    op_fields::optional("bias", &LayerNormArgs::bias),
    op_fields::numbers(&LayerNormArgs::numbers, op_fields::kNormNumbers),
    op_fields::in_place_result("out", &LayerNormArgs::out));
inline std::vector<int64_t> result_shape(const LayerNormArgs& args) {
  return {args.x.shape[0], args.x.shape[1]};
}

template <>
inline constexpr auto kOpFields<AddArgs> =
    std::tuple_cat(op_fields::updated("out", &AddArgs::out), op_fields::input("x", &AddArgs::x),
                   op_fields::number("scale", &AddArgs::scale));

template <>
inline constexpr auto kOpFields<LinearArgs> = std::tuple_cat(
    op_fields::input("x", &LinearArgs::x), op_fields::input("weight", &LinearArgs::weight),
    op_fields::optional("bias", &LinearArgs::bias), op_fields::result("out", &LinearArgs::out),
    op_fields::number("accumulate", &LinearArgs::accumulate));
inline std::vector<int64_t> result_shape(const LinearArgs& args) {
  return {args.x.shape[0], args.weight->out_features};
}

template <>
inline constexpr auto kOpFields<GroupedLinearArgs> =
    std::tuple_cat(op_fields::input("x", &GroupedLinearArgs::x),
                   op_fields::input("weights", &GroupedLinearArgs::weights),
                   op_fields::input("weight_ids", &GroupedLinearArgs::weight_ids),
                   op_fields::optional("bias", &GroupedLinearArgs::bias),
                   op_fields::result("out", &GroupedLinearArgs::out));
inline std::vector<int64_t> result_shape(const GroupedLinearArgs& args) {
  return {args.weight_ids.shape[0], args.weights.empty() ? 0 : args.weights[0]->out_features};
}

template <>
inline constexpr auto kOpFields<RouteExpertsArgs> =
    std::tuple_cat(op_fields::input("logits", &RouteExpertsArgs::logits),
                   op_fields::updated("ids", &RouteExpertsArgs::ids),
                   op_fields::updated("weights", &RouteExpertsArgs::weights),
                   op_fields::optional("choice_bias", &RouteExpertsArgs::choice_bias),
                   op_fields::optional("expert_scales", &RouteExpertsArgs::expert_scales),
                   op_fields::numbers(&RouteExpertsArgs::numbers, op_fields::kRouterNumbers));

template <>
inline constexpr auto kOpFields<CombineExpertsArgs> =
    std::tuple_cat(op_fields::input("x", &CombineExpertsArgs::x),
                   op_fields::input("weights", &CombineExpertsArgs::weights),
                   op_fields::result("out", &CombineExpertsArgs::out),
                   op_fields::number("accumulate", &CombineExpertsArgs::accumulate));
inline std::vector<int64_t> result_shape(const CombineExpertsArgs& args) {
  return {args.weights.shape[0], args.x.shape[1]};
}

template <>
inline constexpr auto kOpFields<RotaryTableArgs> =
    std::tuple_cat(op_fields::input("positions", &RotaryTableArgs::positions),
                   op_fields::input("inv_freq", &RotaryTableArgs::inv_freq),
                   op_fields::number("scale", &RotaryTableArgs::scale),
                   op_fields::number("growth", &RotaryTableArgs::growth),
                   op_fields::number("period", &RotaryTableArgs::period),
                   op_fields::result("cos_sin", &RotaryTableArgs::cos_sin));
inline std::vector<int64_t> result_shape(const RotaryTableArgs& args) {
  return {std::ssize(args.positions), 2 * std::ssize(args.inv_freq)};
}

template <>
inline constexpr auto kOpFields<RotaryArgs> =
    std::tuple_cat(op_fields::updated("heads", &RotaryArgs::heads),
                   op_fields::input("cos_sin", &RotaryArgs::cos_sin),
                   op_fields::number("interleaved", &RotaryArgs::interleaved),
                   op_fields::optional("out", &RotaryArgs::out));

template <>
inline constexpr auto kOpFields<StoreKvArgs> = std::tuple_cat(
    op_fields::input("keys", &StoreKvArgs::keys), op_fields::input("values", &StoreKvArgs::values),
    op_fields::input("slots", &StoreKvArgs::slots), op_fields::cache_arrays(&StoreKvArgs::cache),
    op_fields::key_layout(&StoreKvArgs::cache));

template <>
inline constexpr auto kOpFields<CopyBlocksArgs> =
    std::tuple_cat(op_fields::input("pairs", &CopyBlocksArgs::pairs),
                   op_fields::cache_arrays(&CopyBlocksArgs::cache));

template <>
inline constexpr auto kOpFields<GatedActivationArgs> =
    std::tuple_cat(op_fields::input("gate_up", &GatedActivationArgs::gate_up),
                   op_fields::input("activation", &GatedActivationArgs::activation),
                   op_fields::result("out", &GatedActivationArgs::out));
inline std::vector<int64_t> result_shape(const GatedActivationArgs& args) {
  return {args.gate_up.shape[0], args.gate_up.shape[1] / 2};
}

template <>
inline constexpr auto kOpFields<ActivationArgs> =
    std::tuple_cat(op_fields::input("x", &ActivationArgs::x),
                   op_fields::input("activation", &ActivationArgs::activation),
                   op_fields::in_place_result("out", &ActivationArgs::out));
inline std::vector<int64_t> result_shape(const ActivationArgs& args) {
  return {args.x.shape[0], args.x.shape[1]};
}

template <>
inline constexpr auto kOpFields<CapLogitsArgs> =
    std::tuple_cat(op_fields::updated("logits", &CapLogitsArgs::logits),
                   op_fields::number("scale", &CapLogitsArgs::scale),
                   op_fields::number("soft_cap", &CapLogitsArgs::soft_cap));

template <>
inline constexpr auto kOpFields<GatherRowsArgs> = std::tuple_cat(
    op_fields::input("x", &GatherRowsArgs::x), op_fields::input("rows", &GatherRowsArgs::rows),
    op_fields::result("out", &GatherRowsArgs::out));
inline std::vector<int64_t> result_shape(const GatherRowsArgs& args) {
  return {std::ssize(args.rows), args.x.shape[1]};
}

}  // namespace llmserve
