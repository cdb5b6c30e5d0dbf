// The families of ops that isa_check goes through. Each reports every comparison to the checker.
#pragma once

#include "checker.h"

namespace llmserve::isa_check {

// check_rows.cpp
void check_norms(Checker& check);
void check_activations(Checker& check);
void check_rotary(Checker& check);
void check_rows_and_cache(Checker& check);
void check_first_non_finite(Checker& check);
// check_linear.cpp
void check_linear(Checker& check);
void check_quantized(Checker& check);
void check_grouped_linear(Checker& check);
// check_formats.cpp
void check_formats(Checker& check);
// check_attention.cpp
void check_attention(Checker& check);
void check_fused(Checker& check);
// check_sampling.cpp
void check_sampling(Checker& check);

}  // namespace llmserve::isa_check
