/* A described GPU: the CUDA runtime and driver as far as torch, Triton and Inductor ask them, for a
   machine that has none. It answers with the properties of one GPU, which are given when this file
   is compiled, keeps the GPU's memory in the host's, so that copies are exact, and launches nothing.

   Loaded with LD_PRELOAD before the CUDA libraries of torch. Its soname is libcuda.so.1, so that
   whoever opens the driver finds this one.

   GPU_NAME, GPU_MAJOR, GPU_MINOR, GPU_MULTIPROCESSORS, GPU_THREADS, GPU_BLOCKS and
   GPU_SHARED_MEMORY (of a multiprocessor), GPU_L2 and GPU_MEMORY (bytes) describe the GPU.

   A launch of a kernel is refused. With TRAINLOAD_DESCRIBED_GPU=dry in the environment launches
   succeed, without effect, after their pointers were checked: that shows whether a program would
   start, and what it asks of the GPU, but never what it computes. Nothing must be compiled then,
   since a constant that a kernel should have made would be arbitrary. */

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define KIB 1024L
#define RESERVED_SHARED_MEMORY KIB /* of a block, by the driver */

/* What a process has asked of the GPU. The order is that of `COUNTED` in described_gpu.py. */
enum count { LAUNCHES, LIBRARY_LAUNCHES, TO_GPU, FROM_GPU, ON_GPU, WAITS, ALLOCATED, RECORDED, COUNTS };
EXPORT long described_gpu_counts[COUNTS];

static __thread cudaError_t last_error;

static int is_dry(void) {
  const char *mode = getenv("TRAINLOAD_DESCRIBED_GPU");
  return mode && !strcmp(mode, "dry");
}

static cudaError_t refused(const char *function) {
  fprintf(stderr, "the described GPU was asked to compute: %s\n", function);
  return last_error = cudaErrorNotSupported;
}

/* While a CUDA graph is recorded, launches are not made, and nothing may wait for the GPU. */
static int is_recording;

static cudaError_t launch(enum count kind, const char *function) {
  if (!is_dry()) return refused(function);
  if (is_recording) kind = RECORDED;
  __atomic_fetch_add(&described_gpu_counts[kind], 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}

static CUresult driver_launch(const char *function) {
  return launch(LAUNCHES, function) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- Memory ---- */

#define MOST_RANGES 65536
static struct { char *begin; size_t size; } ranges[MOST_RANGES];
static int range_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t allocate(void **pointer, size_t size, int on_gpu) {
  *pointer = aligned_alloc(512, (size + 511) / 512 * 512);
  if (!*pointer) return last_error = cudaErrorMemoryAllocation;
  if (!on_gpu) return cudaSuccess;
  pthread_mutex_lock(&lock);
  int full = range_count == MOST_RANGES;
  if (!full) {
    ranges[range_count].begin = *pointer;
    ranges[range_count++].size = size;
    described_gpu_counts[ALLOCATED] += size;
  }
  pthread_mutex_unlock(&lock);
  return full ? (last_error = cudaErrorMemoryAllocation) : cudaSuccess;
}

static void forget(void *pointer) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < range_count; i++)
    if (ranges[i].begin == pointer) {
      described_gpu_counts[ALLOCATED] -= ranges[i].size;
      ranges[i] = ranges[--range_count];
      break;
    }
  pthread_mutex_unlock(&lock);
  free(pointer);
}

/* Triton asks for every pointer that it passes to a kernel whether the GPU can read it. */
EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < range_count && !found; i++)
    found = (char *)pointer >= ranges[i].begin && (char *)pointer < ranges[i].begin + ranges[i].size;
  pthread_mutex_unlock(&lock);
  if (!found) {
    fprintf(stderr, "a kernel was given memory that is not the described GPU's\n");
    return CUDA_ERROR_INVALID_VALUE;
  }
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

static cudaError_t copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  enum count which = kind == cudaMemcpyHostToDevice ? TO_GPU : kind == cudaMemcpyDeviceToHost ? FROM_GPU : ON_GPU;
  __atomic_fetch_add(&described_gpu_counts[which], 1, __ATOMIC_RELAXED);
  memcpy(to, from, size);
  return cudaSuccess;
}

static cudaError_t waited(void) {
  if (is_recording) return last_error = cudaErrorStreamCaptureUnsupported;
  __atomic_fetch_add(&described_gpu_counts[WAITS], 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void **p, size_t size) { return allocate(p, size, 1); }
EXPORT cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t s) { return refused("cudaMallocAsync"); }
EXPORT cudaError_t cudaFree(void *p) { forget(p); return cudaSuccess; }
EXPORT cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { return allocate(p, size, 0); }
EXPORT cudaError_t cudaFreeHost(void *p) { free(p); return cudaSuccess; }
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { cudaError_t error = waited(); return error ? error : copy(to, from, size, kind); }
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s) { return copy(to, from, size, kind); }
EXPORT cudaError_t cudaMemset(void *p, int value, size_t size) { memset(p, value, size); return cudaSuccess; }
EXPORT cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t s) { memset(p, value, size); return cudaSuccess; }
EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) { *free_bytes = GPU_MEMORY - 1024 * KIB * KIB; *total = GPU_MEMORY; return cudaSuccess; }
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *p) { memset(attributes, 0, sizeof *attributes); return cudaSuccess; }

/* ---- The device ---- */

static int attribute(CUdevice_attribute which) { /* cudaDeviceAttr has the same numbers */
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return INT32_MAX;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 * KIB;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 * KIB;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1500000; /* kHz; for estimates of time alone */
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2000000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return GPU_MULTIPROCESSORS;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return GPU_L2;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return GPU_THREADS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return GPU_MAJOR;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return GPU_MINOR;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return GPU_SHARED_MEMORY;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return GPU_SHARED_MEMORY - RESERVED_SHARED_MEMORY;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return RESERVED_SHARED_MEMORY;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return GPU_BLOCKS;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return GPU_MAJOR >= 9;
    default: return 0;
  }
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  if (device != 0) return last_error = cudaErrorInvalidDevice;
  memset(p, 0, sizeof *p);
  strncpy(p->name, GPU_NAME, sizeof p->name - 1);
  p->totalGlobalMem = GPU_MEMORY;
  p->l2CacheSize = GPU_L2;
  p->major = GPU_MAJOR;
  p->minor = GPU_MINOR;
  p->multiProcessorCount = GPU_MULTIPROCESSORS;
  p->maxThreadsPerMultiProcessor = GPU_THREADS;
  p->maxBlocksPerMultiProcessor = attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
  p->sharedMemPerMultiprocessor = GPU_SHARED_MEMORY;
  p->sharedMemPerBlock = 48 * KIB;
  p->sharedMemPerBlockOptin = GPU_SHARED_MEMORY - RESERVED_SHARED_MEMORY;
  p->reservedSharedMemPerBlock = RESERVED_SHARED_MEMORY;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = INT32_MAX;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = INT32_MAX;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 64 * KIB;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->memoryBusWidth = 5120;
  p->asyncEngineCount = 3;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->managedMemory = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  p->clusterLaunch = GPU_MAJOR >= 9;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : (last_error = cudaErrorInvalidDevice); }
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) { *value = attribute((CUdevice_attribute)which); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) { snprintf(id, size, "0000:00:00.0"); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return cudaSuccess; }
EXPORT cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorString(cudaError_t error) { if (error == cudaErrorStreamCaptureUnsupported) return "operation not permitted when stream is capturing"; return error == cudaErrorNotSupported ? "the described GPU computes nothing" : "error of the described GPU"; }

/* ---- Streams and events: all work is done when it is asked for ---- */

EXPORT cudaError_t cudaDeviceSynchronize(void) { return waited(); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) { return waited(); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) { return waited(); }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = (cudaEvent_t)1; return cudaSuccess; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return cudaEventCreate(e); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) { return cudaSuccess; }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) { *milliseconds = 1.0f; return cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  static long number;
  *s = (cudaStream_t)(16 * __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED) + 16);
  return cudaSuccess;
}

/* ---- CUDA graphs: a graph is the number of launches that were recorded ---- */

static cudaStream_t recorded_stream;
static long recorded_before;
static unsigned long long recordings;

static enum cudaStreamCaptureStatus status_of(cudaStream_t s) { return is_recording && s == recorded_stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = status_of(s); return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
  *status = status_of(s);
  if (id) *id = recordings;
  if (g) *g = (cudaGraph_t)&recorded_before;
  if (n) *n = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  if (is_recording) return last_error = cudaErrorIllegalState;
  is_recording = 1;
  recorded_stream = s;
  recordings++;
  recorded_before = described_gpu_counts[RECORDED];
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
  if (!is_recording || s != recorded_stream) return last_error = cudaErrorIllegalState;
  is_recording = 0;
  *graph = (cudaGraph_t)(described_gpu_counts[RECORDED] - recorded_before + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = (size_t)graph - 1; return cudaSuccess; }
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { *made = (cudaGraphExec_t)graph; return cudaSuccess; }
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { return cudaGraphInstantiate(made, graph, flags); }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t s) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) { return launch(LAUNCHES, "cudaGraphLaunch"); }

/* ---- Kernels ---- */

EXPORT cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) { return launch(LIBRARY_LAUNCHES, "cudaLaunchKernel"); }
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **arguments) { return launch(LIBRARY_LAUNCHES, "cudaLaunchKernelExC"); }
EXPORT cudaError_t __cudaLaunchKernel(void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) { return launch(LIBRARY_LAUNCHES, "__cudaLaunchKernel"); }
EXPORT cudaError_t __cudaLaunchKernel_ptsz(void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) { return launch(LIBRARY_LAUNCHES, "__cudaLaunchKernel_ptsz"); }
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *f) { memset(attributes, 0, sizeof *attributes); attributes->maxThreadsPerBlock = 1024; attributes->numRegs = 32; return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads, size_t shared, unsigned flags) { *blocks = 2; return cudaSuccess; }

/* A kernel of Triton: what its cubin says about registers and stack, which Inductor asks for. */
struct kernel { int registers, stack; };
enum { EIFMT_SVAL = 4, EIATTR_MIN_STACK_SIZE = 0x11, EIATTR_REGCOUNT = 0x2f }; /* entries of .nv.info */

static CUresult load(CUmodule *module, const char *image) {
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
  struct kernel *made = calloc(1, sizeof *made);
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
  const char *names = image + sections[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, ".nv.info")) continue;
    const uint8_t *entry = (const uint8_t *)image + sections[i].sh_offset, *end = entry + sections[i].sh_size;
    while (entry + 4 <= end) {
      unsigned size = entry[0] == EIFMT_SVAL ? entry[2] | entry[3] << 8 : 0;
      if (size == 8 && entry + 12 <= end) { /* the function's index, and a value */
        uint32_t value;
        memcpy(&value, entry + 8, sizeof value);
        if (entry[1] == EIATTR_REGCOUNT) made->registers = value;
        if (entry[1] == EIATTR_MIN_STACK_SIZE) made->stack = value;
      }
      entry += 4 + size;
    }
  }
  *module = (CUmodule)made;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) { return load(module, image); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) { return load(module, image); }
EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  fseek(file, 0, SEEK_END);
  size_t size = ftell(file);
  rewind(file);
  char *image = malloc(size + sizeof(Elf64_Ehdr));
  CUresult result = image && fread(image, 1, size, file) == size ? load(module, image) : CUDA_ERROR_INVALID_IMAGE;
  free(image);
  fclose(file);
  return result;
}
EXPORT CUresult cuModuleUnload(CUmodule module) { free(module); return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = (CUfunction)module; return CUDA_SUCCESS; }
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  const struct kernel *kernel = (const struct kernel *)function;
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
         : which == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES      ? kernel->stack
         : which == CU_FUNC_ATTRIBUTE_NUM_REGS              ? kernel->registers
                                                            : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void **arguments, void **extra) { return driver_launch("cuLaunchKernel"); }
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **arguments, void **extra) { return driver_launch("cuLaunchKernelEx"); }

/* ---- The rest of the driver ---- */

EXPORT CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) { *value = attribute(which); return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = KIB * KIB; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) { *text = "refused by the described GPU"; return CUDA_SUCCESS; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

/* Symbols that Triton and libcaffe2_nvrtc.so need in order to be loaded. What we run never calls
   them; the headers declare them with other types, so they are given their names by the assembler. */
#define REFUSED(name) \
  EXPORT CUresult refuse_##name(void) __asm__(#name); \
  CUresult refuse_##name(void) { fprintf(stderr, "the described GPU was asked for %s\n", #name); return CUDA_ERROR_NOT_SUPPORTED; }
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuOccupancyMaxActiveClusters)
REFUSED(cuTensorMapEncodeTiled)
REFUSED(cuTensorMapEncodeIm2col)
