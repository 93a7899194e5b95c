# cmake -D OUTPUT=page.cc -D "INPUTS=page.html;page.css" -P BallastEmbed.cmake: a source that holds each file as a
# string_view in ballast::cli::embedded, named after the file (page.html: page_html).
# SPDX-License-Identifier: Apache-2.0
set(text "// Written by the build.\n#include <string_view>\n\nnamespace ballast::cli::embedded {\n")
foreach(input IN LISTS INPUTS)
  get_filename_component(name "${input}" NAME)
  string(MAKE_C_IDENTIFIER "${name}" name)
  file(READ "${input}" bytes HEX)
  string(LENGTH "${bytes}" count)
  math(EXPR count "${count} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
  string(APPEND text "static constexpr char ${name}_bytes[] = {${bytes}'\\0'};\n"
                     "extern const std::string_view ${name};\n"
                     "const std::string_view ${name}(${name}_bytes, ${count});\n")
endforeach()
file(WRITE "${OUTPUT}" "${text}}  // namespace ballast::cli::embedded\n")
