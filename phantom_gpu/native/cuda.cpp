// The CUDA runtime and driver of a GPU that is not there.
//
// Device memory is address space that nothing may touch, counted per GPU in the driver's pages of
// 2 MiB. Kernels do nothing. Streams and events exist and are always finished. What is copied from
// the device reads as zeros. Everything that PyTorch decides by asking (name, compute capability,
// memory left, pointer attributes) is answered from LABKIT_PHANTOM.
//
// Functions that are not here are stubs that say "success"; phantom_gpu/build_stubs.py writes them.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kPageBytes = size_t(2) << 20;
constexpr int kMostGpus = 16;

struct Gpu {
  std::string name = "phantom";
  int major = 8, minor = 0, multiprocessors = 108;
  size_t shared_bytes = 166912;  // of one block, after opting in
  size_t total_bytes = size_t(80) << 30, context_bytes = 0;
  int count = 1, visible = 1;
  int numbers[kMostGpus] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};  // in the machine
};

// Which of them CUDA_VISIBLE_DEVICES leaves: those before its first number that is none of them.
void leave_visible(Gpu& gpu) {
  const char* text = getenv("CUDA_VISIBLE_DEVICES");
  gpu.visible = text ? 0 : gpu.count;
  for (char* end; text && gpu.visible < gpu.count; text = *end == ',' ? end + 1 : nullptr) {
    long number = strtol(text, &end, 10);
    if (end == text || number < 0 || number >= gpu.count) break;
    gpu.numbers[gpu.visible++] = number;
  }
}

// LABKIT_PHANTOM holds, separated by semicolons: name, major, minor, multiprocessors, bytes of shared
// memory per block, bytes in all, bytes of the context, number of GPUs. phantom_gpu/environment.py writes it.
Gpu read_gpu() {
  Gpu gpu;
  const char* text = getenv("LABKIT_PHANTOM");
  if (!text) return gpu;
  std::vector<std::string> fields;
  std::string rest(text);
  for (size_t end; (end = rest.find(';')) != std::string::npos; rest.erase(0, end + 1))
    fields.push_back(rest.substr(0, end));
  fields.push_back(rest);
  if (fields.size() != 8) {
    fprintf(stderr, "labkit's phantom GPU: LABKIT_PHANTOM has %zu fields, not 8\n", fields.size());
    abort();
  }
  gpu.name = fields[0];
  gpu.major = atoi(fields[1].c_str());
  gpu.minor = atoi(fields[2].c_str());
  gpu.multiprocessors = atoi(fields[3].c_str());
  gpu.shared_bytes = strtoull(fields[4].c_str(), nullptr, 10);
  gpu.total_bytes = strtoull(fields[5].c_str(), nullptr, 10);
  gpu.context_bytes = strtoull(fields[6].c_str(), nullptr, 10);
  gpu.count = std::min(atoi(fields[7].c_str()), kMostGpus);
  leave_visible(gpu);
  return gpu;
}

const Gpu& gpu() {
  static const Gpu read = read_gpu();
  return read;
}

// --- memory ------------------------------------------------------------------------------------

struct Range {
  size_t bytes;
  int device;
};

std::recursive_mutex memory_lock;
using Locked = std::lock_guard<std::recursive_mutex>;
std::map<uintptr_t, Range> ranges;  // addresses that belong to a device
std::map<uintptr_t, size_t> pinned;  // bytes of page-locked host memory
std::map<CUmemGenericAllocationHandle, Range> handles;  // of cuMemCreate
CUmemGenericAllocationHandle next_handle = 1;
size_t used_bytes[kMostGpus];

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::vector<char> last_copy;  // to the device: see phantom_last_copy

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

size_t whole_pages(size_t bytes) { return (std::max<size_t>(bytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes; }

// The processes of one program share its GPUs: each counts what it holds in a row of the file that
// LABKIT_PHANTOM_SHARED names, behind the bytes that the context of each further process takes.
struct Row {
  std::atomic<pid_t> pid;
  std::atomic<size_t> bytes[kMostGpus];
};
constexpr int kMostRows = 256;

struct Shared {
  Row* rows = nullptr;
  Row* own = nullptr;
  size_t context_bytes = 0;
  ~Shared() {
    if (own && own->pid == getpid()) own->pid = 0;  // not in a fork of this process
  }
};

bool has_ended(pid_t pid) {
  char state = 'X', path[32];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  if (FILE* file = fopen(path, "r")) {
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'R';  // a name may hold a bracket
    fclose(file);
  }
  return state == 'X' || state == 'Z';
}

Shared& shared() {
  static Shared found = [] {
    Shared made;
    const char* text = getenv("LABKIT_PHANTOM_SHARED");
    const char* path = text ? strchr(text, ';') : nullptr;
    if (!path) return made;
    int file = open(path + 1, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Row) * kMostRows)) {
      fprintf(stderr, "labkit's phantom GPU: cannot write %s\n", path + 1);
      abort();
    }
    void* at = mmap(nullptr, sizeof(Row) * kMostRows, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) abort();
    made.rows = static_cast<Row*>(at);
    made.context_bytes = strtoull(text, nullptr, 10);
    return made;
  }();
  return found;
}

size_t others_bytes(int device) {
  size_t bytes = 0;
  for (int n = 0; shared().rows && n < kMostRows; ++n) {
    Row& row = shared().rows[n];
    pid_t pid = row.pid;
    size_t held = row.bytes[gpu().numbers[device]];
    if (pid && pid != getpid() && held && !has_ended(pid)) bytes += held + shared().context_bytes;
  }
  return bytes;
}

// The row of this process; null where there is nothing to share, or more processes than rows.
Row* own_row() {
  Shared& all = shared();
  if (all.own && all.own->pid != getpid()) return nullptr;  // a fork, which cannot use CUDA
  for (int n = 0; all.rows && !all.own && n < kMostRows; ++n) {
    pid_t before = all.rows[n].pid;
    if (before && before != getpid() && !has_ended(before)) continue;
    if (!all.rows[n].pid.compare_exchange_strong(before, getpid())) continue;
    all.own = &all.rows[n];
    for (auto& bytes : all.own->bytes) bytes = 0;
  }
  return all.own;
}

void hold(int device, size_t bytes) {
  used_bytes[device] += bytes;
  if (Row* row = own_row()) row->bytes[gpu().numbers[device]] = used_bytes[device];
}

void let_go(int device, size_t bytes) { hold(device, -bytes); }

size_t free_bytes_of(int device) {
  size_t taken = gpu().context_bytes + used_bytes[device] + others_bytes(device);
  return taken < gpu().total_bytes ? gpu().total_bytes - taken : 0;
}

// Hold bytes of a device, unless it has no room for them. What cannot fit is never counted, or another
// process would fail beside it. Of two that ask for the same room at once, neither may get it.
bool took(int device, size_t bytes) {
  if (bytes > free_bytes_of(device)) return false;
  hold(device, bytes);
  bool fits = gpu().context_bytes + used_bytes[device] + others_bytes(device) <= gpu().total_bytes;
  if (!fits) let_go(device, bytes);
  return fits;
}

// Where the driver puts memory: gpumem/allocator/driver_addresses.py says how, and how that is known. Each
// map is start -> end.
constexpr size_t kChunkBytes = size_t(32) << 20;
constexpr uintptr_t kLowest = uintptr_t(1) << 40, kTop = uintptr_t(1) << 45;
using Free = std::map<uintptr_t, uintptr_t>;

struct Chunk {
  uintptr_t end;
  size_t used_bytes;
};

Free space = {{kLowest, kTop}};             // outside chunks
Free left[kMostGpus];                       // inside the chunks of a device
std::map<uintptr_t, Chunk> chunks;          // of all devices, by their start

// Take `bytes` of a free range, from its start or its end; return where they begin.
uintptr_t take(Free& free, Free::iterator range, size_t bytes, bool from_end) {
  auto [start, end] = *range;
  free.erase(range);
  if (end - start > bytes) {
    if (from_end)
      free[start] = end - bytes;
    else
      free[start + bytes] = end;
  }
  return from_end ? end - bytes : start;
}

// Add a range, joined with those beside it that lie from `lowest` to `highest`.
void give_back(Free& free, uintptr_t start, uintptr_t end, uintptr_t lowest, uintptr_t highest) {
  auto after = free.find(end);
  if (after != free.end() && end < highest) {
    end = after->second;
    free.erase(after);
  }
  auto before = free.lower_bound(start);
  if (before != free.begin() && start > lowest && (--before)->second == start)
    before->second = end;
  else
    free[start] = end;
}

uintptr_t device_address(int device, size_t bytes) {
  for (auto range = left[device].begin(); range != left[device].end(); range++)
    if (range->second - range->first >= bytes) {
      uintptr_t start = take(left[device], range, bytes, false);
      std::prev(chunks.upper_bound(start))->second.used_bytes += bytes;
      return start;
    }
  size_t chunk_bytes = (bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  auto range = space.end();
  do {
    if (range == space.begin()) return 0;
    range--;
  } while (range->second - range->first < chunk_bytes);
  uintptr_t start = take(space, range, chunk_bytes, true), end = start + chunk_bytes;
  chunks[start] = {end, bytes};
  if (start + bytes < end) left[device][start + bytes] = end;
  return start;
}

void free_address(int device, uintptr_t address, size_t bytes) {
  auto chunk = std::prev(chunks.upper_bound(address));
  auto [start, end] = std::pair(chunk->first, chunk->second.end);
  chunk->second.used_bytes -= bytes;
  if (chunk->second.used_bytes) {
    give_back(left[device], address, address + bytes, start, end);
    return;
  }
  left[device].erase(left[device].lower_bound(start), left[device].lower_bound(end));
  chunks.erase(chunk);
  give_back(space, start, end, kLowest, kTop);
}

// Address space without memory behind it, at one place.
void* map_nothing(uintptr_t address, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void* mapped = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, flags, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

// What programs reserve themselves (cuMemAddressReserve) lies above, and is not used again.
void* reserve(size_t bytes) {
  static uintptr_t next = kTop;
  void* mapped = map_nothing(next, bytes);
  if (mapped) next += whole_pages(bytes);
  return mapped;
}

const Range* range_of(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return nullptr;
  auto& [start, range] = *std::prev(after);
  return address < start + range.bytes ? &range : nullptr;
}

bool is_pinned(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  auto& [start, bytes] = *std::prev(after);
  return address < start + bytes;
}

// Write zeros, but leave alone whole pages of the host that nothing has touched: they read as zeros
// already, and offloaded states of a large model would otherwise need real memory.
void zero_host(void* pointer, size_t bytes) {
  static const size_t page = sysconf(_SC_PAGESIZE);
  auto start = reinterpret_cast<uintptr_t>(pointer), end = start + bytes;
  uintptr_t first = (start + page - 1) / page * page, last = end / page * page;
  if (first >= last) {
    memset(pointer, 0, bytes);
    return;
  }
  memset(pointer, 0, first - start);
  memset(reinterpret_cast<void*>(last), 0, end - last);
  std::vector<unsigned char> resident((last - first) / page);
  bool known = mincore(reinterpret_cast<void*>(first), last - first, resident.data()) == 0;
  for (size_t n = 0; n < resident.size(); n++)
    if (!known || resident[n] & 1) memset(reinterpret_cast<void*>(first + n * page), 0, page);
}

void copy(void* target, const void* source, size_t bytes) {
  Locked locked(memory_lock);
  bool to_device = range_of(target), from_device = range_of(source);
  if (to_device && !from_device && bytes <= (size_t(1) << 20)) {
    auto first = static_cast<const char*>(source);
    last_copy.assign(first, first + bytes);
  }
  if (to_device) return;
  if (from_device)
    zero_host(target, bytes);
  else
    memmove(target, source, bytes);
}

}  // namespace

// What was copied to a device last by this thread, of at most 1 MiB. `torch.tensor(..., device="cuda")`
// copies out of sight of Python's dispatch, so the values that Python follows begin here.
API size_t phantom_last_copy(const void** first) {
  *first = last_copy.data();
  return last_copy.size();
}

// What Python follows values with is a dispatch mode. Where one is active, PyTorch's operators choose ways that
// any mode can see into, and some of these allocate more: the mode that follows values must look to them like
// none, as long as it is alone. They ask libc10, whose function is found here first (LD_PRELOAD); Python's
// bindings ask it, too, and get the truth.
static void* follower = nullptr;  // that mode's PyObject
API void phantom_followed_by(void* mode) { follower = mode; }
API bool _ZN3c104impl21dispatch_mode_enabledEv() {
  struct Mode {  // c10::SafePyObject
    void* object;
  };
  static void* c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  static auto enabled = (bool (*)())dlsym(c10, "_ZN3c104impl21dispatch_mode_enabledEv");
  static auto count = (int64_t (*)())dlsym(c10, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
  static auto mode = (const std::shared_ptr<Mode>& (*)(int64_t))dlsym(
      c10, "_ZN3c104impl20TorchDispatchModeTLS12get_stack_atEl");
  if (!enabled()) return false;
  if (!count || !mode || count() != 1 || mode(0)->object != follower) return true;
  Dl_info caller;
  return dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "libtorch_python");
}

// Only cuDNN knows how it lays out the weights of recurrent layers, and what these keep for the backward pass:
// this says no to them where they ask whether cuDNN may do their work.
API bool _ZN2at6native19cudnn_is_acceptableERKNS_6TensorE(const void*) { return false; }
API bool _ZN2at6native29_use_cudnn_rnn_flatten_weightEv() { return false; }

// Functions of NVIDIA's libraries that were asked how large a workspace must be, each followed by a space.
static std::string unsized;
API void phantom_unsized(const char* function) {
  Locked locked(memory_lock);
  if (unsized.find(function) == std::string::npos) unsized += std::string(function) + " ";
}
API const char* phantom_unsized_functions() { return unsized.c_str(); }

// For NVML's stubs.
API int phantom_count() { return gpu().count; }
API const char* phantom_name() { return gpu().name.c_str(); }
API void phantom_capability(int* major, int* minor) {
  *major = gpu().major;
  *minor = gpu().minor;
}
// The number in the machine of one that this process sees.
API int phantom_number(int device) { return gpu().numbers[device]; }
// What other processes of the program hold of one, with their contexts.
API size_t phantom_others(int device) { return others_bytes(device); }
API void phantom_memory(int device, unsigned long long* total, unsigned long long* used) {
  Locked locked(memory_lock);
  *total = gpu().total_bytes;
  *used = gpu().total_bytes - free_bytes_of(device);
}

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Locked locked(memory_lock);
  size_t rounded = whole_pages(bytes);
  *pointer = nullptr;
  if (!took(current_device, rounded)) return fail(cudaErrorMemoryAllocation);
  uintptr_t address = device_address(current_device, rounded);
  if (address) *pointer = map_nothing(address, rounded);
  if (!*pointer) {
    let_go(current_device, rounded);
    return fail(cudaErrorMemoryAllocation);
  }
  ranges[reinterpret_cast<uintptr_t>(*pointer)] = {rounded, current_device};
  return cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  Locked locked(memory_lock);
  auto found = ranges.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == ranges.end()) return fail(cudaErrorInvalidValue);
  auto [bytes, device] = found->second;
  munmap(pointer, bytes);
  free_address(device, found->first, bytes);
  let_go(device, bytes);
  ranges.erase(found);
  return cudaSuccess;
}

API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }

API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  Locked locked(memory_lock);
  *total_bytes = gpu().total_bytes;
  *free_bytes = free_bytes_of(current_device);
  return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Locked locked(memory_lock);
  pinned[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  Locked locked(memory_lock);
  pinned.erase(reinterpret_cast<uintptr_t>(pointer));
  return cudaSuccess;
}
API cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) {
  return posix_memalign(pointer, 4096, std::max<size_t>(bytes, 1)) ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  cudaError_t error = cudaMallocManaged(pointer, bytes, 0);
  return error ? error : cudaHostRegister(*pointer, bytes, 0);
}
API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
API cudaError_t cudaFreeHost(void* pointer) {
  cudaHostUnregister(pointer);
  free(pointer);
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Locked locked(memory_lock);
  memset(attributes, 0, sizeof *attributes);
  if (const Range* range = range_of(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = range->device;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else {
    attributes->type = is_pinned(pointer) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->device = -1;
    attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  copy(target, source, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  copy(target, source, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                                  size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++)
    copy(static_cast<char*>(target) + row * target_pitch, static_cast<const char*>(source) + row * source_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  Locked locked(memory_lock);
  if (!range_of(pointer)) memset(pointer, value, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(pointer, value, bytes);
}
API cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  *pointer = const_cast<void*>(symbol);
  return cudaSuccess;
}

// --- devices -----------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = gpu().visible;
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= gpu().visible) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", where
// PyTorch or Triton ask; the same for every GPU otherwise.
static int threads_per_multiprocessor() {
  bool consumer = (gpu().major == 8 && gpu().minor >= 6) || gpu().major == 12;
  if (gpu().major == 7 && gpu().minor == 5) return 1024;
  return consumer ? 1536 : 2048;
}

// CUDA 12's header renames it to what its library calls it.
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", gpu().name.c_str());
  for (int n = 0; n < 16; n++) properties->uuid.bytes[n] = char(n + 1 + device);
  properties->totalGlobalMem = gpu().total_bytes;
  properties->major = gpu().major;
  properties->minor = gpu().minor;
  properties->multiProcessorCount = gpu().multiprocessors;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = gpu().shared_bytes;
  properties->sharedMemPerMultiprocessor = gpu().shared_bytes + 1024;
  properties->reservedSharedMemPerBlock = 1024;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = threads_per_multiprocessor();
  properties->maxBlocksPerMultiProcessor = 16;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->totalConstMem = 65536;
  properties->l2CacheSize = 40 << 20;
  properties->memoryBusWidth = 5120;
  properties->memPitch = 2147483647;
  properties->textureAlignment = 512;
  properties->texturePitchAlignment = 32;
  properties->maxTexture1D = 131072;
  properties->asyncEngineCount = 3;
  properties->concurrentKernels = properties->cooperativeLaunch = 1;
  properties->unifiedAddressing = properties->managedMemory = properties->concurrentManagedAccess = 1;
  properties->canMapHostMemory = properties->memoryPoolsSupported = 1;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}

// The driver's attributes have the same numbers as the runtime's.
static int attribute(int which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return gpu().major;
    case cudaDevAttrComputeCapabilityMinor: return gpu().minor;
    case cudaDevAttrMultiProcessorCount: return gpu().multiprocessors;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return int(gpu().shared_bytes);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return int(gpu().shared_bytes) + 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return threads_per_multiprocessor();
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrL2CacheSize: return 40 << 20;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: return 0;
    default: return 1;
  }
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  snprintf(text, bytes, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    default: return "not supported by labkit's phantom GPU";
  }
}
API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    default: return "cudaErrorUnknown";
  }
}

// --- kernels -----------------------------------------------------------------------------------

namespace {
struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
thread_local std::vector<Launch> launches;  // between push and pop, around a kernel's host stub
}  // namespace

API void** __cudaRegisterFatBinary(void*) {
  static void* binary[4];
  return binary;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  launches.push_back({grid, block, shared_bytes, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (launches.empty()) return fail(cudaErrorInvalidValue);
  Launch launch = launches.back();
  launches.pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared_bytes = launch.shared_bytes;
  *static_cast<void**>(stream) = launch.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// CUB chooses its policy by the architecture a kernel was compiled for, and refuses one that PyTorch's
// wheel has no code for: the highest of the wheel's that this GPU can run (8.9 runs the code for 8.6).
static int compiled_for() {
  int capability = gpu().major * 10 + gpu().minor, best = 75;
  for (int architecture : {75, 80, 86, 90, 100, 120})
    if (architecture <= capability) best = architecture;
  return best;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = compiled_for();
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// --- CUDA graphs: what is captured runs at once, and a replay does nothing -----------------------

namespace {
using Capture = unsigned long long;
std::map<cudaStream_t, Capture> captures;  // by the streams that take part
Capture last_capture = 0;

Capture capture_on(cudaStream_t stream) {
  Locked locked(memory_lock);
  auto found = captures.find(stream);
  return found == captures.end() ? 0 : found->second;
}
cudaError_t capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, Capture* id, cudaGraph_t* graph) {
  Capture capture = capture_on(stream);
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = capture;
  if (graph) *graph = (cudaGraph_t)capture;
  return cudaSuccess;
}
}  // namespace

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Locked locked(memory_lock);
  captures[stream] = ++last_capture;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Locked locked(memory_lock);
  Capture capture = capture_on(stream);
  *graph = (cudaGraph_t)capture;
  for (auto each = captures.begin(); each != captures.end();)
    each = each->second == capture ? captures.erase(each) : std::next(each);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return capture_info(stream, status, nullptr, nullptr);
}
#if CUDART_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, Capture* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         size_t*) {
  return capture_info(stream, status, id, graph);
}
#else
API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status, Capture* id,
                                            cudaGraph_t* graph, const cudaGraphNode_t**, size_t*) {
  return capture_info(stream, status, id, graph);
}
API cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, cudaStreamCaptureStatus* status, Capture* id,
                                            cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t*) {
  return capture_info(stream, status, id, graph);
}
#endif
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;  // PyTorch warns of a graph without nodes
  return cudaSuccess;
}

// --- streams and events: whatever is asked of them has happened ---------------------------------

namespace {
struct Event {
  double milliseconds;
  Capture capture = 0;  // that of the stream where it was recorded
};
double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
}  // namespace

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = (cudaStream_t)calloc(1, 64);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event{now()};
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *(Event*)event = {now(), capture_on(stream)};
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Locked locked(memory_lock);
  Capture capture = ((Event*)event)->capture;
  for (auto& [other, running] : captures)
    if (running == capture) {  // it has not ended: `stream` joins
      captures[stream] = capture;
      break;
    }
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = float(((Event*)end)->milliseconds - ((Event*)start)->milliseconds);
  return cudaSuccess;
}

// --- the driver ---------------------------------------------------------------------------------

API CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* count) {
  *count = gpu().visible;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}
// Triton holds what it launches to these.
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "not supported by labkit's phantom GPU";
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)0x1000;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kPageBytes;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  Locked locked(memory_lock);
  void* address = reserve(bytes);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  ranges[reinterpret_cast<uintptr_t>(address)] = {bytes, current_device};
  *pointer = reinterpret_cast<CUdeviceptr>(address);
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  Locked locked(memory_lock);
  ranges.erase(pointer);
  munmap(reinterpret_cast<void*>(pointer), bytes);
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* wanted,
                         unsigned long long) {
  Locked locked(memory_lock);
  int device = wanted ? wanted->location.id : current_device;
  if (!took(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  handles[next_handle] = {bytes, device};
  *handle = next_handle++;
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Locked locked(memory_lock);
  auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  let_go(found->second.device, found->second.bytes);
  handles.erase(found);
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr) {
  memset(value, 0, sizeof(int));
  return CUDA_SUCCESS;
}
API CUresult phantom_unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

// PyTorch reaches the driver by name only.
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = reinterpret_cast<void*>(phantom_unsupported);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                        cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
