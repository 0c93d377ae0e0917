// The emulator's cuda_runtime.h: what the CUDA sources of this project use of the CUDA language and runtime, for the host
// compiler. Meanings are those of the CUDA programming guide; what is missing does not compile.
#pragma once

#define SPIPE_CUDA_EMULATED 1

#include "emulated_atomics.h"
#include "emulated_host_api.h"
#include "emulated_language.h"
#include "emulated_math.h"
#include "emulated_mma.h"
#include "emulated_warp.h"
