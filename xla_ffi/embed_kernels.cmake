# Preprocesses the PTX kernels, assembles them where there is a ptxas, and writes both as a C++ file.
#   cmake -DCXX=... -DPTX_DIR=... -DPTXAS=... -DWORK_DIR=... -DOUTPUT=... -P embed_kernels.cmake
# The text goes in always: the driver compiles it on chips later than sm_90, and where PTXAS is empty or too old.

set(definitions "")
set(entries "")
foreach(kernel plan dispatch combine)
  set(text ${WORK_DIR}/${kernel}.ptx)
  execute_process(
    COMMAND ${CXX} -x assembler-with-cpp -E -P ${PTX_DIR}/${kernel}.ptx -o ${text}
    COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${text} hex HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
  string(APPEND definitions "const unsigned char ${kernel}_ptx[] = {${bytes}0};\n")

  set(cubin_entry "nullptr, 0")
  if(PTXAS)
    set(cubin ${WORK_DIR}/${kernel}.cubin)
    execute_process(COMMAND ${PTXAS} -arch=sm_90 -o ${cubin} ${text}
                    RESULT_VARIABLE failed ERROR_VARIABLE why OUTPUT_VARIABLE why)
    if(failed)
      message(WARNING "${PTXAS} cannot assemble ${kernel}: the driver will, at start-up.\n${why}")
    else()
      file(READ ${cubin} hex HEX)
      string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
      string(APPEND definitions
             "alignas(16) const unsigned char ${kernel}_cubin[] = {${bytes}};\n")
      set(cubin_entry "${kernel}_cubin, sizeof(${kernel}_cubin)")
    endif()
  endif()
  string(APPEND entries
         "    {\"jax_moe_${kernel}\", reinterpret_cast<const char*>(${kernel}_ptx), ${cubin_entry}},\n")
endforeach()

file(WRITE ${OUTPUT} "// Written by embed_kernels.cmake.
#include \"cuda_images.h\"

namespace jax_moe::cuda {

namespace {
${definitions}}  // namespace

const KernelImage kKernelImages[kNumKernels] = {
${entries}};

}  // namespace jax_moe::cuda
")
