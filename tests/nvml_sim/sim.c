/* A libnvidia-ml.so.1 without a driver: every answer comes from the file that NVML_SIM_STATE names.
 *
 * Tests write that file (control.py); this library reads it, and writes only the counters, the growth of a process list
 * and what is left of a counted fault. NVML_SIM_VISIBLE_DEVICES (comma-separated UUIDs) narrows the GPUs that one
 * process sees, as device cgroups do.
 *
 * Symbols an older driver lacks are left out by -DNO_... (library.py names the variants). */
#define _GNU_SOURCE
#include "nvml_types.h"
#include "sim.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define HANDLE_MAGIC 0x51d0cafeu
#define STUCK_WRITER_MS 10000
#define STRUCT_VERSION(type, version) ((unsigned int)(sizeof(type) | (version) << 24))

/* Drivers around 535.54 wrote entries of 32 bytes through the same symbols. */
#ifdef STRIDE32
#define PROCESS_STRIDE sizeof(nvmlProcessDetail_v1_t)
#else
#define PROCESS_STRIDE sizeof(nvmlProcessInfo_t)
#endif

/* Field ids that a driver does not know are refused one by one; the recovery action (230) came last. */
#ifndef FIELD_LIMIT
#define FIELD_LIMIT 400
#endif

struct nvmlDevice_st {
    uint32_t magic;
    uint32_t slot;
    uint32_t mig; /* slot + 1; 0 = the whole GPU */
    uint32_t generation;
    uint32_t mig_generation;
    uint32_t epoch; /* the initialisation that gave it */
};

struct nvmlEventSet_st {
    uint64_t types[SIM_MAX_DEVICES];
    uint64_t since[SIM_MAX_DEVICES]; /* first event after the registration */
    uint64_t next;
};

/* ---- the library's own state ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sim_state *mapped; /* valid while `references` is not 0, or `inside` is held since then */
static dev_t mapped_device;
static ino_t mapped_inode;
static int references;
static int inside; /* calls that may be looking at `mapped` */
static bool init_failed;
static uint32_t epoch;
static uint32_t driver_gen;
static char first_driver[sizeof(((struct sim_state *)0)->driver_version)];
static char visible_devices[4096];
static nvmlDevice_t handles[SIM_MAX_DEVICES][SIM_MAX_MIG + 1];

static void pause_ms(uint32_t milliseconds)
{
    struct timespec left = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000L};
    while (nanosleep(&left, &left) != 0)
        continue;
}

static uint64_t monotonic_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* ---- consistent reads: retry while a test is writing ---- */

static uint32_t snapshot_begin(const struct sim_state *state)
{
    for (uint32_t waited = 0;; waited++) {
        uint32_t sequence = __atomic_load_n(&state->sequence, __ATOMIC_ACQUIRE);
        if (sequence % 2 == 0 || waited >= STUCK_WRITER_MS)
            return sequence;
        pause_ms(1);
    }
}

static bool snapshot_valid(const struct sim_state *state, uint32_t sequence)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&state->sequence, __ATOMIC_RELAXED) == sequence;
}

/* The block may run more than once, so it only assigns; it must not leave by return or break. */
#define SNAPSHOT(state)                                                                                               \
    for (uint32_t done_ = 0, sequence_ = 0; !done_ && (sequence_ = snapshot_begin(state), true);                      \
         done_ = snapshot_valid(state, sequence_))

/* ---- faults and counters ---- */

static int32_t take_code(struct sim_fault *fault)
{
    int32_t remaining = __atomic_load_n(&fault->remaining, __ATOMIC_ACQUIRE);
    while (remaining > 0) {
        if (__atomic_compare_exchange_n(&fault->remaining, &remaining, remaining - 1, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
            break;
    }
    return remaining == 0 ? 0 : fault->code;
}

static nvmlReturn_t suffer(struct sim_fault *fault)
{
    while (__atomic_load_n(&fault->hang, __ATOMIC_ACQUIRE))
        pause_ms(1);
    uint32_t delay = __atomic_load_n(&fault->delay_ms, __ATOMIC_ACQUIRE);
    if (delay)
        pause_ms(delay);
    return (nvmlReturn_t)take_code(fault);
}

static void count_in(struct sim_counters *counters, enum sim_family family)
{
    __atomic_add_fetch(&counters->calls[family], 1, __ATOMIC_ACQ_REL);
    __atomic_add_fetch(&counters->inflight[family], 1, __ATOMIC_ACQ_REL);
}

static void count_out(struct sim_counters *counters, enum sim_family family)
{
    __atomic_sub_fetch(&counters->inflight[family], 1, __ATOMIC_ACQ_REL);
}

/* ---- devices and handles ---- */

static bool is_visible(const struct sim_device *device)
{
    return device->present && (!visible_devices[0] || strstr(visible_devices, device->uuid) != NULL);
}

static bool slot_at_index(const struct sim_state *state, unsigned int index, uint32_t *slot)
{
    unsigned int seen = 0;
    for (uint32_t candidate = 0; candidate < SIM_MAX_DEVICES; candidate++) {
        if (is_visible(&state->devices[candidate]) && seen++ == index) {
            *slot = candidate;
            return true;
        }
    }
    return false;
}

static unsigned int visible_before(const struct sim_state *state, uint32_t slot)
{
    unsigned int seen = 0;
    for (uint32_t candidate = 0; candidate < slot; candidate++)
        seen += is_visible(&state->devices[candidate]);
    return seen;
}

static uint32_t mig_generation(const struct sim_device *device, uint32_t mig)
{
    return mig ? device->mig[mig - 1].generation : 0;
}

static bool is_current(const struct sim_state *state, nvmlDevice_t handle)
{
    const struct sim_device *device = &state->devices[handle->slot];
    if (handle->generation != device->generation)
        return false;
    if ((state->options & SIM_HANDLES_DIE_AT_INIT) && handle->epoch != epoch)
        return false;
    return (state->options & SIM_MIG_HANDLES_REUSED) || handle->mig_generation == mig_generation(device, handle->mig);
}

/* Handles are never freed, so that an old one can be told from a new one instead of crashing the process. */
static nvmlReturn_t give_handle(const struct sim_state *state, uint32_t slot, uint32_t mig, nvmlDevice_t *result)
{
    nvmlReturn_t code = NVML_SUCCESS;
    pthread_mutex_lock(&lock);
    nvmlDevice_t *known = &handles[slot][mig];
    if (*known == NULL || !is_current(state, *known)) {
        nvmlDevice_t fresh = malloc(sizeof *fresh);
        if (fresh == NULL) {
            code = NVML_ERROR_MEMORY;
        } else {
            const struct sim_device *device = &state->devices[slot];
            *fresh = (struct nvmlDevice_st){HANDLE_MAGIC, slot, mig, device->generation, mig_generation(device, mig), epoch};
            *known = fresh;
        }
    }
    if (code == NVML_SUCCESS)
        *result = *known;
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- one call ---- */

struct call {
    enum sim_family family;
    nvmlReturn_t code; /* not SUCCESS: the function answers this at once */
    bool counted;
    struct sim_state *state;
    struct sim_device *device; /* NULL for calls on no GPU */
    struct sim_mig *mig;       /* NULL for the whole GPU */
    uint32_t slot;
};

static void end_call(struct call *call)
{
    if (call->device != NULL)
        count_out(&call->device->counters, call->family);
    if (call->counted)
        count_out(&call->state->counters, call->family);
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
}

static struct call begin_call(enum sim_family family)
{
    struct call call = {.family = family, .code = NVML_ERROR_UNINITIALIZED};
    __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&references, __ATOMIC_SEQ_CST) == 0)
        return call;
    call.state = mapped;
    call.counted = true;
    count_in(&call.state->counters, family);
    if (__atomic_load_n(&call.state->driver_gen, __ATOMIC_ACQUIRE) != driver_gen)
        call.code = (nvmlReturn_t)call.state->stale_code;
    else
        call.code = suffer(&call.state->faults[family]);
    return call;
}

/* Faults of a GPU and of its slices are apart: a container may read its slice and be refused the GPU. */
static nvmlReturn_t enter_device(struct call *call, uint32_t slot, uint32_t mig)
{
    struct sim_device *device = &call->state->devices[slot];
    call->slot = slot;
    call->device = device;
    call->mig = mig ? &device->mig[mig - 1] : NULL;
    count_in(&device->counters, call->family);
    if (!device->present)
        return (nvmlReturn_t)device->absent_code;
    nvmlReturn_t code = suffer(call->mig ? &call->mig->faults[call->family] : &device->faults[call->family]);
    if (device->lost_code)
        return (nvmlReturn_t)device->lost_code;
    if (code == NVML_SUCCESS && (device->unsupported >> call->family & 1))
        return NVML_ERROR_NOT_SUPPORTED;
    return code;
}

static nvmlReturn_t enter_handle(struct call *call, nvmlDevice_t handle)
{
    if (handle == NULL || handle->magic != HANDLE_MAGIC || !is_current(call->state, handle))
        return NVML_ERROR_INVALID_ARGUMENT;
    if (handle->mig && !call->state->devices[handle->slot].mig[handle->mig - 1].present)
        return NVML_ERROR_INVALID_ARGUMENT;
    return enter_device(call, handle->slot, handle->mig);
}

/* Declares `call`, counts it in and out, and returns from the function when the call fails. */
#define BEGIN(family)                                                                                                 \
    struct call call __attribute__((cleanup(end_call))) = begin_call(family);                                         \
    if (call.code != NVML_SUCCESS)                                                                                    \
        return call.code

#define BEGIN_ON(family, handle)                                                                                      \
    BEGIN(family);                                                                                                    \
    call.code = enter_handle(&call, handle);                                                                          \
    if (call.code != NVML_SUCCESS)                                                                                    \
        return call.code

#define REQUIRE(condition)                                                                                            \
    if (!(condition))                                                                                                 \
        return NVML_ERROR_INVALID_ARGUMENT

#define REQUIRE_WHOLE_GPU()                                                                                           \
    if (call.mig != NULL)                                                                                             \
        return NVML_ERROR_NOT_SUPPORTED

/* The functions that answer one number of the whole GPU. */
#define DEVICE_VALUE(function, family, type, expression)                                                              \
    EXPORT nvmlReturn_t function(nvmlDevice_t handle, type *value)                                                    \
    {                                                                                                                 \
        BEGIN_ON(family, handle);                                                                                     \
        REQUIRE(value != NULL);                                                                                       \
        REQUIRE_WHOLE_GPU();                                                                                          \
        SNAPSHOT(call.state) { *value = (type)(expression); }                                                         \
        return NVML_SUCCESS;                                                                                          \
    }

static nvmlReturn_t give_string(const struct sim_state *state, const char *text, size_t capacity, char *out,
                                unsigned int length)
{
    nvmlReturn_t code = NVML_SUCCESS;
    SNAPSHOT(state)
    {
        size_t used = strnlen(text, capacity - 1);
        code = used < length ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
        if (code == NVML_SUCCESS) {
            memcpy(out, text, used);
            out[used] = '\0';
        }
    }
    return code;
}

/* ---- initialisation ---- */

static nvmlReturn_t map_state(void)
{
    const char *path = getenv("NVML_SIM_STATE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    struct stat status;
    if (fstat(file, &status) != 0) {
        close(file);
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    if (mapped != NULL && status.st_dev == mapped_device && status.st_ino == mapped_inode) {
        close(file);
        return NVML_SUCCESS;
    }
    if (status.st_size != (off_t)sizeof(struct sim_state)) {
        close(file);
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    }
    struct sim_state *fresh = mmap(NULL, sizeof *fresh, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (fresh == MAP_FAILED)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    if (fresh->magic != SIM_MAGIC || fresh->version != SIM_VERSION || fresh->size != sizeof *fresh) {
        munmap(fresh, sizeof *fresh);
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    }
    /* A call that still hangs in the old file keeps it mapped: better a leak than a crash. */
    if (mapped != NULL && __atomic_load_n(&inside, __ATOMIC_SEQ_CST) == 0)
        munmap(mapped, sizeof *mapped);
    mapped = fresh;
    mapped_device = status.st_dev;
    mapped_inode = status.st_ino;
    first_driver[0] = '\0';
    memset(handles, 0, sizeof handles);
    return NVML_SUCCESS;
}

static nvmlReturn_t check_driver_version(const struct sim_state *state)
{
    char version[sizeof first_driver];
    SNAPSHOT(state) { memcpy(version, state->driver_version, sizeof version); }
    if (!first_driver[0])
        memcpy(first_driver, version, sizeof version);
    bool changed = strncmp(first_driver, version, sizeof version) != 0;
    return changed && (state->options & SIM_LIBRARY_PINNED) ? NVML_ERROR_LIB_RM_VERSION_MISMATCH : NVML_SUCCESS;
}

static void read_visible_devices(void)
{
    const char *visible = getenv("NVML_SIM_VISIBLE_DEVICES");
    snprintf(visible_devices, sizeof visible_devices, "%s", visible ? visible : "");
}

static nvmlReturn_t open_library(struct sim_state *state)
{
    nvmlReturn_t code = check_driver_version(state);
    if (code != NVML_SUCCESS)
        return code;
    read_visible_devices();
    driver_gen = __atomic_load_n(&state->driver_gen, __ATOMIC_ACQUIRE);
    epoch++;
    __atomic_add_fetch(&state->opened, 1, __ATOMIC_ACQ_REL);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = references ? NVML_SUCCESS : map_state();
    struct sim_state *state = mapped;
    init_failed = code != NVML_SUCCESS;
    if (code == NVML_SUCCESS)
        __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&lock);
    if (code != NVML_SUCCESS)
        return code;

    count_in(&state->counters, SIM_INIT);
    code = suffer(&state->faults[SIM_INIT]); /* may hang, so not under the lock */
    pthread_mutex_lock(&lock);
    if (code == NVML_SUCCESS && references == 0)
        code = open_library(state);
    if (code == NVML_SUCCESS)
        __atomic_add_fetch(&references, 1, __ATOMIC_SEQ_CST);
    init_failed = code != NVML_SUCCESS;
    pthread_mutex_unlock(&lock);
    count_out(&state->counters, SIM_INIT);
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    return code;
}

/* The real library answers SUCCESS to a shutdown after a failed init. */
static nvmlReturn_t shutdown_unopened(void)
{
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = references == 0 && init_failed ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    init_failed = false;
    pthread_mutex_unlock(&lock);
    return code;
}

static nvmlReturn_t close_library(struct sim_state *state)
{
    nvmlReturn_t code = NVML_ERROR_UNINITIALIZED;
    pthread_mutex_lock(&lock);
    if (references > 0) {
        code = NVML_SUCCESS;
        if (__atomic_sub_fetch(&references, 1, __ATOMIC_SEQ_CST) == 0)
            __atomic_add_fetch(&state->closed, 1, __ATOMIC_ACQ_REL);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    struct call call __attribute__((cleanup(end_call))) = begin_call(SIM_SHUTDOWN);
    if (!call.counted)
        return shutdown_unopened();
    bool reloaded = __atomic_load_n(&call.state->driver_gen, __ATOMIC_ACQUIRE) != driver_gen;
    if (call.code != NVML_SUCCESS && !reloaded)
        return call.code;
    return close_library(call.state);
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "GPU access blocked by the operating system",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "vGPU ECC not supported",
        "Insufficient Resources",
        "Invalid Frequency",
        "Argument version mismatch",
        "Requested functionality has been deprecated",
        "System is not in ready state",
        "No supported GPUs were found",
        "Resource not in correct state to perform requested operation",
    };
    int number = (int)code;
    return number >= 0 && number < (int)(sizeof texts / sizeof *texts) ? texts[number] : "Unknown Error";
}

/* ---- the system ---- */

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    BEGIN(SIM_SYSTEM);
    REQUIRE(version != NULL);
    return give_string(call.state, call.state->driver_version, sizeof call.state->driver_version, version, length);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
#ifndef NVML_VERSION_NEEDS_INIT
    if (__atomic_load_n(&references, __ATOMIC_SEQ_CST) == 0) {
        static const char built_in[] = "12.550.163.01";
        REQUIRE(version != NULL);
        if (length < sizeof built_in)
            return NVML_ERROR_INSUFFICIENT_SIZE;
        memcpy(version, built_in, sizeof built_in);
        return NVML_SUCCESS;
    }
#endif
    BEGIN(SIM_SYSTEM);
    REQUIRE(version != NULL);
    return give_string(call.state, call.state->nvml_version, sizeof call.state->nvml_version, version, length);
}

static nvmlReturn_t cuda_driver_version(int *version)
{
    BEGIN(SIM_SYSTEM);
    REQUIRE(version != NULL);
    *version = call.state->cuda_version;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return cuda_driver_version(version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return cuda_driver_version(version);
}

static const char *find_process_name(const struct sim_state *state, unsigned int pid)
{
    for (uint32_t slot = 0; slot < SIM_MAX_DEVICES; slot++) {
        const struct sim_device *device = &state->devices[slot];
        for (uint32_t i = 0; i < device->process_count && i < SIM_MAX_PROCESSES; i++)
            if (is_visible(device) && !device->processes[i].hidden && device->processes[i].pid == pid)
                return device->processes[i].name;
    }
    return NULL;
}

/* Too long a name is cropped, not refused. */
EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    BEGIN(SIM_PROCESS_NAME);
    REQUIRE(name != NULL && length > 0);
    bool found = false;
    SNAPSHOT(call.state)
    {
        const char *text = find_process_name(call.state, pid);
        found = text != NULL;
        if (found) {
            size_t used = strnlen(text, length - 1);
            memcpy(name, text, used);
            name[used] = '\0';
        }
    }
    return found ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* ---- which GPUs ---- */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    BEGIN(SIM_COUNT);
    REQUIRE(count != NULL);
    SNAPSHOT(call.state) { *count = visible_before(call.state, SIM_MAX_DEVICES); }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *handle)
{
    BEGIN(SIM_HANDLE);
    REQUIRE(handle != NULL);
    bool found = false;
    uint32_t slot = 0;
    SNAPSHOT(call.state) { found = slot_at_index(call.state, index, &slot); }
    REQUIRE(found);
    nvmlReturn_t code = enter_device(&call, slot, 0);
    return code == NVML_SUCCESS ? give_handle(call.state, slot, 0, handle) : code;
}

static bool find_uuid(const struct sim_state *state, const char *uuid, uint32_t *slot, uint32_t *mig)
{
    for (*slot = 0; *slot < SIM_MAX_DEVICES; ++*slot) {
        const struct sim_device *device = &state->devices[*slot];
        if (!is_visible(device))
            continue;
        *mig = 0;
        if (strncmp(device->uuid, uuid, sizeof device->uuid) == 0)
            return true;
        for (*mig = 1; *mig <= SIM_MAX_MIG; ++*mig) {
            const struct sim_mig *slice = &device->mig[*mig - 1];
            if (slice->present && strncmp(slice->uuid, uuid, sizeof slice->uuid) == 0)
                return true;
        }
    }
    return false;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle)
{
    BEGIN(SIM_HANDLE);
    REQUIRE(uuid != NULL && handle != NULL);
    bool found = false;
    uint32_t slot = 0, mig = 0;
    SNAPSHOT(call.state) { found = find_uuid(call.state, uuid, &slot, &mig); }
    if (!found)
        return NVML_ERROR_NOT_FOUND;
    nvmlReturn_t code = enter_device(&call, slot, mig);
    return code == NVML_SUCCESS ? give_handle(call.state, slot, mig, handle) : code;
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned int *index)
{
    BEGIN_ON(SIM_IDENTITY, handle);
    REQUIRE(index != NULL);
    SNAPSHOT(call.state) { *index = handle->mig ? handle->mig - 1 : visible_before(call.state, call.slot); }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned int length)
{
    BEGIN_ON(SIM_IDENTITY, handle);
    REQUIRE(uuid != NULL);
    const char *text = call.mig ? call.mig->uuid : call.device->uuid;
    return give_string(call.state, text, sizeof call.device->uuid, uuid, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t handle, char *name, unsigned int length)
{
    BEGIN_ON(SIM_IDENTITY, handle);
    REQUIRE(name != NULL);
    return give_string(call.state, call.device->name, sizeof call.device->name, name, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t handle, char *serial, unsigned int length)
{
    BEGIN_ON(SIM_IDENTITY, handle);
    REQUIRE(serial != NULL);
    if (!call.device->serial[0])
        return NVML_ERROR_NOT_SUPPORTED;
    return give_string(call.state, call.device->serial, sizeof call.device->serial, serial, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t handle, unsigned int *minor)
{
    BEGIN_ON(SIM_IDENTITY, handle);
    REQUIRE(minor != NULL);
    *minor = call.device->minor;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *pci)
{
    BEGIN_ON(SIM_IDENTITY, handle);
    REQUIRE(pci != NULL);
    SNAPSHOT(call.state)
    {
        memset(pci, 0, sizeof *pci);
        pci->domain = call.device->pci_domain;
        pci->bus = call.device->pci_bus;
        pci->device = call.device->pci_device;
        pci->pciDeviceId = call.device->pci_device_id;
        pci->pciSubSystemId = call.device->pci_subsystem_id;
        snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
                 pci->device & 0xff);
        snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus & 0xff, pci->device & 0xff);
    }
    return NVML_SUCCESS;
}

/* ---- memory ---- */

struct memory {
    uint64_t total;
    uint64_t reserved;
    uint64_t used; /* without reserved */
    uint64_t free;
};

static struct memory read_memory(const struct call *call)
{
    struct memory memory = {0};
    SNAPSHOT(call->state)
    {
        memory.total = call->mig ? call->mig->total : call->device->total;
        memory.reserved = call->mig ? call->mig->reserved : call->device->reserved;
        memory.used = call->mig ? call->mig->used : call->device->used;
    }
    uint64_t taken = memory.used + memory.reserved;
    memory.free = memory.total > taken ? memory.total - taken : 0;
    return memory;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *result)
{
    BEGIN_ON(SIM_MEMORY, handle);
    REQUIRE(result != NULL);
    struct memory memory = read_memory(&call);
    result->total = memory.total;
    result->free = memory.free;
    result->used = memory.used + memory.reserved;
    return NVML_SUCCESS;
}

#ifndef NO_MEM_V2
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *result)
{
    BEGIN_ON(SIM_MEMORY, handle);
    REQUIRE(result != NULL);
    if (result->version != STRUCT_VERSION(nvmlMemory_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    struct memory memory = read_memory(&call);
    result->total = memory.total;
    result->reserved = memory.reserved;
    result->free = memory.free;
    result->used = memory.used;
    return NVML_SUCCESS;
}
#endif

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t handle, nvmlBAR1Memory_t *result)
{
    BEGIN_ON(SIM_BAR1, handle);
    REQUIRE(result != NULL);
    SNAPSHOT(call.state)
    {
        result->bar1Total = call.device->bar1_total;
        result->bar1Used = call.device->bar1_used;
        result->bar1Free = result->bar1Total - result->bar1Used;
    }
    return NVML_SUCCESS;
}

#ifndef NO_CONF_COMPUTE
EXPORT nvmlReturn_t nvmlDeviceGetConfComputeMemSizeInfo(nvmlDevice_t handle, nvmlConfComputeMemSizeInfo_t *result)
{
    BEGIN_ON(SIM_CONF_COMPUTE, handle);
    REQUIRE(result != NULL);
    REQUIRE_WHOLE_GPU();
    result->protectedMemSizeKib = 0;
    SNAPSHOT(call.state) { result->unprotectedMemSizeKib = call.device->total / 1024; }
    return NVML_SUCCESS;
}
#endif

/* ---- processes ---- */

static bool is_listed(const struct call *call, const struct sim_process *process, uint32_t kind)
{
    if (process->hidden || !(process->kinds & kind))
        return false;
    return call->mig == NULL || (process->gpu_instance == call->mig->gpu_instance &&
                                 process->compute_instance == call->mig->compute_instance);
}

static void write_entry(void *entries, unsigned int index, size_t stride, const struct sim_process *process,
                        uint32_t pid)
{
    nvmlProcessDetail_v1_t entry = {
        .pid = pid,
        .usedGpuMemory = process->used,
        .gpuInstanceId = process->gpu_instance,
        .computeInstanceId = process->compute_instance,
        .usedGpuCcProtectedMemory = process->cc_protected,
    };
    memcpy((char *)entries + index * stride, &entry, stride);
}

/* Writes at most `capacity` entries of `stride` bytes; returns how many there are. */
static unsigned int copy_processes(const struct call *call, uint32_t kind, size_t stride, void *entries,
                                   unsigned int capacity)
{
    const struct sim_process *first = NULL;
    unsigned int found = 0;
    for (uint32_t i = 0; i < call->device->process_count && i < SIM_MAX_PROCESSES; i++) {
        const struct sim_process *process = &call->device->processes[i];
        if (!is_listed(call, process, kind))
            continue;
        if (first == NULL)
            first = process;
        if (found < capacity)
            write_entry(entries, found, stride, process, process->pid);
        found++;
    }
    uint32_t grown = first ? __atomic_load_n(&call->device->grown, __ATOMIC_ACQUIRE) : 0;
    for (uint32_t i = 0; i < grown; i++, found++)
        if (found < capacity)
            write_entry(entries, found, stride, first, first->pid + 100000 + i);
    return found;
}

static void grow_after_probe(struct sim_device *device)
{
    int32_t remaining = __atomic_load_n(&device->grow_remaining, __ATOMIC_ACQUIRE);
    if (remaining == 0)
        return;
    if (remaining > 0)
        __atomic_sub_fetch(&device->grow_remaining, 1, __ATOMIC_ACQ_REL);
    __atomic_add_fetch(&device->grown, device->grow_by, __ATOMIC_ACQ_REL);
}

/* The size probe: a capacity of 0 answers SUCCESS without processes, else INSUFFICIENT_SIZE and the count. */
static nvmlReturn_t list_processes(const struct call *call, uint32_t kind, size_t stride, unsigned int *count,
                                   void *entries)
{
    REQUIRE(count != NULL && (*count == 0 || entries != NULL));
    unsigned int capacity = *count, found = 0;
    SNAPSHOT(call->state) { found = copy_processes(call, kind, stride, entries, capacity); }
    *count = found;
    if (capacity == 0 && found > 0)
        grow_after_probe(call->device);
    return found > capacity ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define PROCESS_LIST(function, family, kind, type)                                                                    \
    EXPORT nvmlReturn_t function(nvmlDevice_t handle, unsigned int *count, type *entries)                             \
    {                                                                                                                 \
        BEGIN_ON(family, handle);                                                                                     \
        return list_processes(&call, kind, PROCESS_STRIDE, count, entries);                                           \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, SIM_COMPUTE_PROCESSES, SIM_COMPUTE, nvmlProcessInfo_v2_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, SIM_GRAPHICS_PROCESSES, SIM_GRAPHICS, nvmlProcessInfo_v2_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, SIM_MPS_PROCESSES, SIM_MPS, nvmlProcessInfo_v2_t)
#ifndef NO_PROC_V3
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, SIM_COMPUTE_PROCESSES, SIM_COMPUTE, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, SIM_GRAPHICS_PROCESSES, SIM_GRAPHICS, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, SIM_MPS_PROCESSES, SIM_MPS, nvmlProcessInfo_t)
#endif

#ifndef NO_PROC_DETAIL
EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t handle, nvmlProcessDetailList_t *list)
{
    BEGIN_ON(SIM_PROCESS_DETAIL, handle);
    REQUIRE(list != NULL && list->version == STRUCT_VERSION(nvmlProcessDetailList_t, 1) && list->mode <= 2);
    uint32_t kind = 1u << list->mode; /* modes 0, 1, 2 are compute, graphics, MPS */
    return list_processes(&call, kind, sizeof *list->procArray, &list->numProcArrayEntries, list->procArray);
}
#endif

static bool is_sampled(const struct sim_process *process, unsigned long long since)
{
    return !process->hidden && process->sampled_us > since;
}

static nvmlReturn_t sampled_result(unsigned int found, unsigned int capacity)
{
    if (found == 0)
        return NVML_ERROR_NOT_FOUND;
    return found > capacity ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t handle, nvmlProcessUtilizationSample_t *samples,
                                                    unsigned int *count, unsigned long long since)
{
    BEGIN_ON(SIM_PROCESS_UTILIZATION, handle);
    REQUIRE(count != NULL);
    if (call.mig || call.device->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned int capacity = samples ? *count : 0, found = 0;
    SNAPSHOT(call.state)
    {
        found = 0;
        for (uint32_t i = 0; i < call.device->process_count && i < SIM_MAX_PROCESSES; i++) {
            const struct sim_process *process = &call.device->processes[i];
            if (!is_sampled(process, since))
                continue;
            if (found < capacity)
                samples[found] = (nvmlProcessUtilizationSample_t){
                    .pid = process->pid,
                    .timeStamp = process->sampled_us,
                    .smUtil = process->sm_percent,
                    .memUtil = process->memory_percent,
                    .encUtil = process->encoder_percent,
                    .decUtil = process->decoder_percent,
                };
            found++;
        }
    }
    *count = found;
    return sampled_result(found, capacity);
}

#ifndef NO_PROCESSES_UTILIZATION
EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t handle, nvmlProcessesUtilizationInfo_t *info)
{
    BEGIN_ON(SIM_PROCESS_UTILIZATION, handle);
    REQUIRE(info != NULL);
    if (info->version != STRUCT_VERSION(nvmlProcessesUtilizationInfo_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (call.mig || call.device->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned int capacity = info->procUtilArray ? info->processSamplesCount : 0, found = 0;
    SNAPSHOT(call.state)
    {
        found = 0;
        for (uint32_t i = 0; i < call.device->process_count && i < SIM_MAX_PROCESSES; i++) {
            const struct sim_process *process = &call.device->processes[i];
            if (!is_sampled(process, info->lastSeenTimeStamp))
                continue;
            if (found < capacity)
                info->procUtilArray[found] = (nvmlProcessUtilizationInfo_v1_t){
                    .timeStamp = process->sampled_us,
                    .pid = process->pid,
                    .smUtil = process->sm_percent,
                    .memUtil = process->memory_percent,
                    .encUtil = process->encoder_percent,
                    .decUtil = process->decoder_percent,
                };
            found++;
        }
    }
    info->processSamplesCount = found;
    return sampled_result(found, capacity);
}
#endif

EXPORT nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t handle, nvmlEnableState_t *mode)
{
    BEGIN_ON(SIM_ACCOUNTING, handle);
    REQUIRE(mode != NULL);
    *mode = call.device->accounting_mode ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t handle, unsigned int *size)
{
    BEGIN_ON(SIM_ACCOUNTING, handle);
    REQUIRE(size != NULL);
    if (!call.device->accounting_mode)
        return NVML_ERROR_NOT_SUPPORTED;
    *size = call.device->accounting_buffer;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t handle, unsigned int *count, unsigned int *pids)
{
    BEGIN_ON(SIM_ACCOUNTING, handle);
    REQUIRE(count != NULL && (*count == 0 || pids != NULL));
    if (!call.device->accounting_mode)
        return NVML_ERROR_NOT_SUPPORTED;
    unsigned int capacity = *count, found = 0;
    SNAPSHOT(call.state)
    {
        for (found = 0; found < call.device->accounted_count && found < SIM_MAX_ACCOUNTED; found++)
            if (found < capacity)
                pids[found] = call.device->accounted[found].pid;
    }
    *count = found;
    return found > capacity ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t handle, unsigned int pid, nvmlAccountingStats_t *stats)
{
    BEGIN_ON(SIM_ACCOUNTING, handle);
    REQUIRE(stats != NULL);
    if (!call.device->accounting_mode)
        return NVML_ERROR_NOT_SUPPORTED;
    bool found = false;
    SNAPSHOT(call.state)
    {
        found = false;
        for (uint32_t i = 0; i < call.device->accounted_count && i < SIM_MAX_ACCOUNTED && !found; i++) {
            const struct sim_accounted *process = &call.device->accounted[i];
            found = process->pid == pid;
            if (found)
                *stats = (nvmlAccountingStats_t){
                    .gpuUtilization = process->gpu_percent,
                    .memoryUtilization = process->memory_percent,
                    .maxMemoryUsage = process->max_memory,
                    .time = process->time_ms,
                    .startTime = process->started_us,
                    .isRunning = process->running,
                };
        }
    }
    return found ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* ---- sensors ---- */

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t handle, nvmlUtilization_t *utilization)
{
    BEGIN_ON(SIM_UTILIZATION, handle);
    REQUIRE(utilization != NULL);
    if (call.mig || call.device->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    SNAPSHOT(call.state)
    {
        utilization->gpu = call.device->gpu_percent;
        utilization->memory = call.device->memory_percent;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t handle, nvmlTemperatureSensors_t sensor, unsigned int *degrees)
{
    BEGIN_ON(SIM_TEMPERATURE, handle);
    REQUIRE(degrees != NULL && sensor == NVML_TEMPERATURE_GPU);
    *degrees = call.device->temperature;
    return NVML_SUCCESS;
}

#ifndef NO_TEMPERATURE_V
EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t handle, nvmlTemperature_t *result)
{
    BEGIN_ON(SIM_TEMPERATURE, handle);
    REQUIRE(result != NULL);
    if (result->version != STRUCT_VERSION(nvmlTemperature_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    REQUIRE(result->sensorType == NVML_TEMPERATURE_GPU);
    result->temperature = (int)call.device->temperature;
    return NVML_SUCCESS;
}
#endif

DEVICE_VALUE(nvmlDeviceGetPowerUsage, SIM_POWER, unsigned int, call.device->power_mw)
DEVICE_VALUE(nvmlDeviceGetEnforcedPowerLimit, SIM_POWER_LIMIT, unsigned int, call.device->power_limit_mw)
DEVICE_VALUE(nvmlDeviceGetTotalEnergyConsumption, SIM_ENERGY, unsigned long long, call.device->energy_mj)
DEVICE_VALUE(nvmlDeviceGetPerformanceState, SIM_PERFORMANCE_STATE, nvmlPstates_t, call.device->performance_state)
DEVICE_VALUE(nvmlDeviceGetVirtualizationMode, SIM_VIRTUALIZATION, nvmlGpuVirtualizationMode_t,
             call.device->virtualization_mode)
DEVICE_VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, SIM_CLOCKS, unsigned long long, call.device->clock_reasons)
#ifndef NO_EVENT_REASONS
DEVICE_VALUE(nvmlDeviceGetCurrentClocksEventReasons, SIM_CLOCKS, unsigned long long, call.device->clock_reasons)
#endif
#ifndef NO_NUMA_NODE
DEVICE_VALUE(nvmlDeviceGetNumaNodeId, SIM_NUMA_NODE, unsigned int, call.device->numa_node)
#endif

#ifndef NO_ADDRESSING
EXPORT nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t handle, nvmlDeviceAddressingMode_t *mode)
{
    BEGIN_ON(SIM_ADDRESSING, handle);
    REQUIRE(mode != NULL);
    REQUIRE_WHOLE_GPU();
    if (mode->version != STRUCT_VERSION(nvmlDeviceAddressingMode_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    mode->value = call.device->addressing_mode;
    return NVML_SUCCESS;
}
#endif

/* ---- memory errors ---- */

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t handle, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    BEGIN_ON(SIM_ECC_MODE, handle);
    REQUIRE(current != NULL && pending != NULL);
    SNAPSHOT(call.state)
    {
        *current = (nvmlEnableState_t)call.device->ecc_current;
        *pending = (nvmlEnableState_t)call.device->ecc_pending;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t handle, nvmlMemoryErrorType_t type,
                                                nvmlEccCounterType_t counter, unsigned long long *errors)
{
    BEGIN_ON(SIM_ECC_ERRORS, handle);
    REQUIRE(errors != NULL && (unsigned int)type <= 1 && (unsigned int)counter <= 1);
    if (!call.device->ecc_current)
        return NVML_ERROR_NOT_SUPPORTED;
    SNAPSHOT(call.state) { *errors = call.device->ecc_errors[type][counter]; }
    return NVML_SUCCESS;
}

static nvmlReturn_t retired_pages(const struct call *call, nvmlPageRetirementCause_t cause, unsigned int *count,
                                  unsigned long long *addresses, unsigned long long *timestamps)
{
    REQUIRE(count != NULL && (*count == 0 || addresses != NULL));
    REQUIRE((unsigned int)cause < NVML_PAGE_RETIREMENT_CAUSE_COUNT);
    unsigned int capacity = *count, found = 0;
    SNAPSHOT(call->state)
    {
        found = 0;
        for (uint32_t i = 0; i < call->device->retired_count && i < SIM_MAX_RETIRED; i++) {
            const struct sim_retired_page *page = &call->device->retired[i];
            if (page->cause != (uint32_t)cause)
                continue;
            if (found < capacity) {
                addresses[found] = page->address;
                if (timestamps)
                    timestamps[found] = page->timestamp;
            }
            found++;
        }
    }
    *count = found;
    return found > capacity ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t handle, nvmlPageRetirementCause_t cause,
                                              unsigned int *count, unsigned long long *addresses)
{
    BEGIN_ON(SIM_RETIRED_PAGES, handle);
    return retired_pages(&call, cause, count, addresses, NULL);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t handle, nvmlPageRetirementCause_t cause,
                                                 unsigned int *count, unsigned long long *addresses,
                                                 unsigned long long *timestamps)
{
    BEGIN_ON(SIM_RETIRED_PAGES, handle);
    return retired_pages(&call, cause, count, addresses, timestamps);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t handle, nvmlEnableState_t *pending)
{
    BEGIN_ON(SIM_RETIRED_PAGES, handle);
    REQUIRE(pending != NULL);
    *pending = call.device->retired_pending ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t handle, unsigned int *correctable,
                                              unsigned int *uncorrectable, unsigned int *pending, unsigned int *failure)
{
    BEGIN_ON(SIM_REMAPPED_ROWS, handle);
    REQUIRE(correctable != NULL && uncorrectable != NULL && pending != NULL && failure != NULL);
    if (call.mig || call.device->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    SNAPSHOT(call.state)
    {
        *correctable = call.device->remapped_correctable;
        *uncorrectable = call.device->remapped_uncorrectable;
        *pending = call.device->remapped_pending;
        *failure = call.device->remapped_failure;
    }
    return NVML_SUCCESS;
}

/* ---- field values ---- */

static void set_unsigned(nvmlFieldValue_t *field, unsigned int value)
{
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    field->value.uiVal = value;
}

static unsigned int retired_by(const struct sim_device *device, uint32_t cause)
{
    unsigned int found = 0;
    for (uint32_t i = 0; i < device->retired_count && i < SIM_MAX_RETIRED; i++)
        found += device->retired[i].cause == cause;
    return found;
}

/* The fields that repeat what another function answers, and the two that no other function does (82, 230). */
static enum sim_family fill_field(const struct sim_device *device, nvmlFieldValue_t *field)
{
    switch (field->fieldId) {
    case 1:
        set_unsigned(field, device->ecc_current);
        return SIM_ECC_MODE;
    case 3:
    case 4:
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        field->value.ullVal = device->ecc_errors[field->fieldId - 3][0];
        return device->ecc_current ? SIM_ECC_ERRORS : SIM_FAMILY_COUNT;
    case 29:
    case 30:
        set_unsigned(field, retired_by(device, field->fieldId - 29));
        return SIM_RETIRED_PAGES;
    case 31:
        set_unsigned(field, device->retired_pending);
        return SIM_RETIRED_PAGES;
    case 82:
        set_unsigned(field, device->memory_temperature);
        return SIM_FIELD_VALUES;
    case 83:
        field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        field->value.ullVal = device->energy_mj;
        return SIM_ENERGY;
    case 142:
        set_unsigned(field, device->remapped_correctable);
        return SIM_REMAPPED_ROWS;
    case 143:
        set_unsigned(field, device->remapped_uncorrectable);
        return SIM_REMAPPED_ROWS;
    case 144:
        set_unsigned(field, device->remapped_pending);
        return SIM_REMAPPED_ROWS;
    case 145:
        set_unsigned(field, device->remapped_failure);
        return SIM_REMAPPED_ROWS;
    case 186:
        set_unsigned(field, device->power_mw);
        return SIM_POWER;
    case 230:
        set_unsigned(field, device->recovery_action);
        return SIM_FIELD_VALUES;
    default:
        return SIM_FAMILY_COUNT;
    }
}

static const struct sim_field *find_field(const struct sim_device *device, const nvmlFieldValue_t *wanted)
{
    for (uint32_t i = 0; i < device->field_count && i < SIM_MAX_FIELDS; i++)
        if (device->fields[i].id == wanted->fieldId && device->fields[i].scope == wanted->scopeId)
            return &device->fields[i];
    return NULL;
}

static void answer_field(const struct sim_device *device, nvmlFieldValue_t *field)
{
    const struct sim_field *set = find_field(device, field);
    memset(&field->value, 0, sizeof field->value);
    field->valueType = NVML_VALUE_TYPE_DOUBLE;
    if (field->fieldId >= FIELD_LIMIT) {
        field->nvmlReturn = NVML_ERROR_INVALID_ARGUMENT;
    } else if (set != NULL) {
        field->nvmlReturn = (nvmlReturn_t)set->code;
        field->valueType = (nvmlValueType_t)set->type;
        field->value.ullVal = set->bits;
    } else {
        enum sim_family family = fill_field(device, field);
        bool supported = family != SIM_FAMILY_COUNT && !(device->unsupported >> family & 1);
        field->nvmlReturn = supported ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    }
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t handle, int count, nvmlFieldValue_t *values)
{
    BEGIN_ON(SIM_FIELD_VALUES, handle);
    REQUIRE(values != NULL && count >= 0);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    SNAPSHOT(call.state)
    {
        for (int i = 0; i < count; i++) {
            answer_field(call.device, &values[i]);
            values[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
            values[i].latencyUsec = 0;
        }
    }
    return NVML_SUCCESS;
}

/* ---- MIG ---- */

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t handle, unsigned int *current, unsigned int *pending)
{
    BEGIN_ON(SIM_MIG, handle);
    REQUIRE(current != NULL && pending != NULL);
    if (!call.device->mig_max)
        return NVML_ERROR_NOT_SUPPORTED;
    SNAPSHOT(call.state)
    {
        *current = call.device->mig_current;
        *pending = call.device->mig_pending;
    }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t handle, unsigned int *count)
{
    BEGIN_ON(SIM_MIG, handle);
    REQUIRE(count != NULL);
    SNAPSHOT(call.state) { *count = call.device->mig_current ? call.device->mig_max : 0; }
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned int index, nvmlDevice_t *slice)
{
    BEGIN_ON(SIM_MIG, handle);
    REQUIRE(slice != NULL);
    if (call.mig || !call.device->mig_current)
        return NVML_ERROR_NOT_SUPPORTED;
    REQUIRE(index < SIM_MAX_MIG && index < call.device->mig_max);
    if (!call.device->mig[index].present)
        return NVML_ERROR_NOT_FOUND;
    return give_handle(call.state, call.slot, index + 1, slice);
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t handle, unsigned int *is_slice)
{
    BEGIN_ON(SIM_MIG, handle);
    REQUIRE(is_slice != NULL);
    *is_slice = call.mig != NULL;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t slice, nvmlDevice_t *handle)
{
    BEGIN_ON(SIM_MIG, slice);
    REQUIRE(handle != NULL && call.mig != NULL);
    return give_handle(call.state, call.slot, 0, handle);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t handle, unsigned int *id)
{
    BEGIN_ON(SIM_MIG, handle);
    REQUIRE(id != NULL);
    if (!call.mig)
        return NVML_ERROR_NOT_SUPPORTED;
    *id = call.mig->gpu_instance;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t handle, unsigned int *id)
{
    BEGIN_ON(SIM_MIG, handle);
    REQUIRE(id != NULL);
    if (!call.mig)
        return NVML_ERROR_NOT_SUPPORTED;
    *id = call.mig->compute_instance;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t handle, nvmlDeviceAttributes_t *attributes)
{
    BEGIN_ON(SIM_MIG, handle);
    REQUIRE(attributes != NULL);
    if (!call.mig)
        return NVML_ERROR_NOT_SUPPORTED;
    SNAPSHOT(call.state)
    {
        *attributes = (nvmlDeviceAttributes_t){
            .multiprocessorCount = call.mig->multiprocessors,
            .gpuInstanceSliceCount = call.mig->gpu_slices,
            .computeInstanceSliceCount = call.mig->compute_slices,
            .memorySizeMB = call.mig->total >> 20,
        };
    }
    return NVML_SUCCESS;
}

/* ---- events ---- */

#define SUPPORTED_EVENTS 0x1full /* ECC single bit, ECC double bit, performance state, critical Xid, clock */

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    BEGIN(SIM_EVENTS);
    REQUIRE(set != NULL);
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    BEGIN(SIM_EVENTS);
    REQUIRE(set != NULL);
    free(set);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t handle, unsigned long long *types)
{
    BEGIN_ON(SIM_EVENTS, handle);
    REQUIRE(types != NULL);
    *types = call.mig ? 0 : SUPPORTED_EVENTS;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t handle, unsigned long long types, nvmlEventSet_t set)
{
    BEGIN_ON(SIM_EVENTS, handle);
    REQUIRE(set != NULL);
    if (call.mig || (types & ~SUPPORTED_EVENTS))
        return NVML_ERROR_NOT_SUPPORTED;
    SNAPSHOT(call.state) { set->since[call.slot] = call.state->event_count; }
    set->types[call.slot] |= types;
    return NVML_SUCCESS;
}

/* Moves the set past the events it does not want; false = none is left. */
static bool next_event(const struct sim_state *state, nvmlEventSet_t set, struct sim_event *event)
{
    bool found = false;
    uint64_t next = 0;
    SNAPSHOT(state)
    {
        uint64_t end = state->event_count;
        uint64_t kept = end > SIM_MAX_EVENTS ? end - SIM_MAX_EVENTS : 0;
        next = set->next > kept ? set->next : kept;
        for (found = false; next < end && !found; next++) {
            *event = state->events[next % SIM_MAX_EVENTS];
            uint32_t slot = event->device;
            found = slot < SIM_MAX_DEVICES && (set->types[slot] & event->type) && next >= set->since[slot];
        }
    }
    set->next = next;
    return found;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    BEGIN(SIM_EVENT_WAIT);
    REQUIRE(set != NULL && data != NULL);
    uint64_t deadline = monotonic_ms() + timeout_ms;
    struct sim_event event;
    while (!next_event(call.state, set, &event)) {
        if (__atomic_load_n(&call.state->driver_gen, __ATOMIC_ACQUIRE) != driver_gen)
            return (nvmlReturn_t)call.state->stale_code;
        if (__atomic_load_n(&references, __ATOMIC_SEQ_CST) == 0)
            return NVML_ERROR_UNINITIALIZED;
        if (monotonic_ms() >= deadline)
            return NVML_ERROR_TIMEOUT;
        pause_ms(2);
    }
    data->eventType = event.type;
    data->eventData = event.data;
    data->gpuInstanceId = event.gpu_instance;
    data->computeInstanceId = event.compute_instance;
    return give_handle(call.state, event.device, 0, &data->device);
}
