"""LLVM as a library: build IR with Python functions, compile, link, cache. No kernel, no device.

- `builder/`          the typed IR builder: modules, functions, loops, vectors, memory
- `math/`             exp, log, erf, sin, … as vector code, with error bounds in ulp
- `nest/`             code of loop-nest bodies: elements in registers, elementwise ops, reductions
- `storage`           element types in memory and in registers; conversions, streaming stores
- `horizontal`        many horizontal reductions at once
- `target`            the CPU that code is made for: triple, vector width, features
- `cpus`              what Linux says about this CPU in LLVM's spelling, and a table of named CPUs
- `jit`               units of IR text to kernels, through the memory and disk caches; trims the
                      compiler's memory afterwards
- `emit_object`       the only file that calls LLVM: IR text to an object file or assembly
- `parallel_compile`  large batches, compiled in worker processes
- `disk_cache`        object files on disk
- `elf`               the linker and loader of objects, in plain Python
- `code_memory`       executable memory and functions of Linux, macOS and Windows

The kernels of a backend are in its own folder (`backends/cpu/kernels`). A GPU backend uses
`builder` and `math` as they are and adds a `Target` with the NVPTX triple: `emit_object` then gives
PTX as assembly, which the device's driver loads in place of `elf`. What is of CPUs here is the
list of features and the vector width in `target`, and the signature that `Module.kernel` gives.
"""
