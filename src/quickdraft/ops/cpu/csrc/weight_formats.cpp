// The names of weight formats, as Python says them.
#include <stdexcept>

#include "weight.h"

namespace quickdraft {

namespace {

constexpr struct {
    WeightFormat format;
    const char* name;
} format_names[] = {
    {WeightFormat::float32, "float32"},
    {WeightFormat::float16, "float16"},
    {WeightFormat::bfloat16, "bfloat16"},
    {WeightFormat::int8, "int8"},
    {WeightFormat::int8_zero, "int8+zero"},
    {WeightFormat::int8_zero_bfloat16, "int8+zero, bfloat16 scales"},
    {WeightFormat::int4, "int4"},
    {WeightFormat::int4_zero, "int4+zero"},
    {WeightFormat::int4_zero_bfloat16, "int4+zero, bfloat16 scales"},
    {WeightFormat::int4_minimum, "int4+minimum"},
    {WeightFormat::int4_minimum_two_level, "int4+minimum, two levels"},
    {WeightFormat::int5, "int5"},
    {WeightFormat::int5_minimum, "int5+minimum"},
    {WeightFormat::int5_minimum_two_level, "int5+minimum, two levels"},
    {WeightFormat::int6_two_level_sixteen, "int6, two levels, groups of 16"},
};

}  // namespace

const char* name_of(WeightFormat format) {
    for (const auto& known : format_names) {
        if (known.format == format) return known.name;
    }
    return "";
}

WeightFormat format_named(const std::string& name) {
    for (const auto& known : format_names) {
        if (known.name == name) return known.format;
    }
    throw std::invalid_argument("unknown weight format '" + name + "'");
}

}  // namespace quickdraft
