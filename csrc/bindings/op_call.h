// Ops bound to Python by the fields of their Args (op_fields.h). Whose arrays the arguments are,
// and what is checked beyond validate(), the Operands of a call say. They have
//
//   ConstTensor in(name, object)               an array that is read; none for None
//   Tensor updated(name, object)               one that is changed in place
//   Tensor cache(name, object)                 keys or values of a cache; see cache_part_of()
//   Tensor result(name, object, shape, bool can_be_first)  the array to write, or a new one
//   std::span<const T> list<T>(name, object)   integers, numbers or pairs, kept for the call
//   const LinearWeight* weight(name, object)
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/op_fields.h"
#include "core/error.h"

namespace llmserve {

// Throws InvalidArgument for a name that the table has not.
Activation parse_activation(const std::string& name);
KeyLayout parse_key_layout(const std::string& name);
RouterScore parse_router_score(const std::string& name);

namespace op_call {

template <class Args>
constexpr bool has_fields() {
  return !std::is_same_v<std::remove_const_t<decltype(kOpFields<Args>)>, std::nullptr_t>;
}
template <class Args>
inline constexpr size_t kNumFields =
    std::tuple_size_v<std::remove_const_t<decltype(kOpFields<Args>)>>;

constexpr bool is_result(FieldRole role) {
  return role == FieldRole::kResult || role == FieldRole::kInPlaceResult;
}

inline pybind11::object to_python(KeyLayout layout) {
  return pybind11::str(layout == KeyLayout::kPanels ? "panels" : "rows");
}
inline pybind11::object to_python(RouterScore score) {
  return pybind11::str(std::string(kRouterScores[static_cast<size_t>(score)]));
}
template <class T>
pybind11::object to_python(const T& number) {
  return pybind11::cast(number);
}

// The argument of field I: with a default, unless it has to be given.
template <class Args, size_t I>
auto argument() {
  constexpr auto& field = std::get<I>(kOpFields<Args>);
  constexpr FieldRole role = std::remove_cvref_t<decltype(field)>::kRole;
  if constexpr (role == FieldRole::kNumber) {
    const Args defaults{};
    return pybind11::arg(field.name) = to_python(field.get(defaults));
  } else if constexpr (role == FieldRole::kOptional || is_result(role)) {
    return pybind11::arg(field.name) = pybind11::none();
  } else {
    return pybind11::arg(field.name);
  }
}

// Python's value as a T. Throws TypeError, as a typed argument of a binding does.
template <class T>
T cast(const char* name, const pybind11::object& given) {
  try {
    return given.cast<T>();
  } catch (const pybind11::cast_error&) {
    throw pybind11::type_error(concat(name, ": unexpected ", std::string(pybind11::repr(given))));
  }
}

template <FieldRole kRole, class Operands, class T>
void set(T& field, Operands& operands, const char* name, const pybind11::object& given) {
  if constexpr (kRole == FieldRole::kCache)
    field = operands.cache(name, given);
  else if constexpr (std::is_same_v<T, ConstTensor>)
    field = operands.in(name, given);
  else if constexpr (std::is_same_v<T, Tensor>)
    field = kRole == FieldRole::kOptional && given.is_none() ? T() : operands.updated(name, given);
  else if constexpr (std::is_same_v<T, const LinearWeight*>)
    field = operands.weight(name, given);
  else if constexpr (std::is_same_v<T, Activation>)
    field = parse_activation(cast<std::string>(name, given));
  else if constexpr (std::is_same_v<T, KeyLayout>)
    field = parse_key_layout(cast<std::string>(name, given));
  else if constexpr (std::is_same_v<T, RouterScore>)
    field = parse_router_score(cast<std::string>(name, given));
  else if constexpr (std::is_arithmetic_v<T>)
    field = cast<T>(name, given);
  else  // a span
    field = operands.template list<typename T::value_type>(name, given);
}

// Args of Python's arguments. Results come last: their shapes follow from the others.
template <class Args, class Operands>
Args make(Operands& operands, const std::array<pybind11::object, kNumFields<Args>>& given) {
  Args args;
  const auto each = [&]<size_t I>(bool are_results) {
    constexpr auto& field = std::get<I>(kOpFields<Args>);
    constexpr FieldRole role = std::remove_cvref_t<decltype(field)>::kRole;
    if (are_results != is_result(role)) return;
    if constexpr (is_result(role))
      field.get(args) = operands.result(field.name, given[I], result_shape(args),
                                        role == FieldRole::kInPlaceResult);
    else
      set<role>(field.get(args), operands, field.name, given[I]);
  };
  [&]<size_t... I>(std::index_sequence<I...>) {
    (each.template operator()<I>(false), ...);
    (each.template operator()<I>(true), ...);
  }(std::make_index_sequence<kNumFields<Args>>{});
  return args;
}

template <size_t>
using Given = const pybind11::object&;

// Binds call(self, given) as method `name` of a class, with one argument a field.
template <class Args, class Class, class Call>
void def(Class& bound, const char* name, Call call) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    bound.def(
        name,
        [call](typename Class::type& self, Given<I>... given) {
          return call(self, std::array<pybind11::object, sizeof...(I)>{given...});
        },
        argument<Args, I>()...);
  }(std::make_index_sequence<kNumFields<Args>>{});
}

}  // namespace op_call
}  // namespace llmserve
